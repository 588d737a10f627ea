"""From one flat graph to sections: where to cut, what each section runs, takes, makes and sends, and its bytes.

In: a flat graph with costs. Out: one ``SectionGraph`` for each section, the same on every machine.
"""
