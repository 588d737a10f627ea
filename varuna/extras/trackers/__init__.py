"""For people who chart runs: in TensorBoard, Weights & Biases, MLflow, or an object of their own.

In: committed steps of the main worker, wherever that is just now. Out: each step once in one chart, over morphs, kills
and resumed runs. Services are spoken to on a thread of their own, and one that fails costs its chart, never the run.
"""
