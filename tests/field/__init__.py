"""The field: models that nobody here chose, in tiny configurations that their libraries' own classes give.

A tool with a life of its own, which measures how much of what people train Varuna takes: it judges each model against
plain PyTorch, keeps verdicts (``verdicts.jsonl``), goes on where it was cut, and writes docs/field.md. ``catalogue``
has the jobs and their order, ``sweep`` judges them in forked processes, ``judge`` says which column a job belongs to.
Each library has a module that makes its models small and finds samples for them: ``huggingface``, ``pictures`` (timm
and torchvision), ``denoisers`` (diffusers). ``python -m tests.field --help`` lists the options.

Every change pays for ``FEW``, one job of each kind of model: ``--sample 6 --briefly --at-once 2 --fresh``.
"""
