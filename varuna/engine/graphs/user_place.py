"""The place in the user's model from which an error of a section comes."""

from torch.fx import GraphModule

from varuna.partition.cut.split import SectionGraph
from varuna.partition.watching.explaining import line_of


def note_place(error: BaseException, section: SectionGraph, graph: object = None) -> None:
    """Add a note to an error that a section has raised: with the user's line, if ``graph`` itself was running."""
    where = _line(error, graph) if isinstance(graph, GraphModule) else None
    error.add_note(f"in section {section.index} ({section.label}){f', which computes {where}' if where else ''}")


def _line(error: BaseException, module: GraphModule) -> str | None:
    """Find the user's line of the operation that failed."""
    lines: dict[int, int | None] = getattr(module, "_lineno_map", None) or {}
    start, trace, found = getattr(module, "_prologue_start", 0) or 0, error.__traceback__, None
    while trace is not None:
        if trace.tb_frame.f_code is type(module).forward.__code__:
            found = lines.get(trace.tb_lineno - start)
        trace = trace.tb_next
    nodes = list(module.graph.nodes)
    return None if found is None or found >= len(nodes) else line_of(nodes[found])
