"""Which module of the package imports which, and the floors: imports go down only."""

import ast
from pathlib import Path
from typing import Dict, List, Set

CORE = "ddp_examples.core."
STANDARD_LIBRARY_ONLY = {
    "exits",
    "ranks",
    "orphans",
    "owner",
    "job",
    "ports",
    "preflight",
    "hello",
    "follow",
    "step",
    "logged",
    "frames",
    "deaths",
    "records",
    "failure",
    "trail",
    "judge",
    "verdict",
    "last_words",
}
NO_TORCH = {
    "plot",
    "demos",
    "config",
    "launch",
    "runs",
    "site",
    "queues",
    "usage",
    "submit",
    "forkserver",
    "node",
}  # a node imports torch only after it has checked
NO_OMEGACONF = {
    "plot",
    "alone",
    "group",
    "digits",
    "verify",
    "rendezvous",
    "agent",
    "preload",
    "progress",
    "debug",
    "watch",
    "witness",
    "stop",
    "training",
}
FLOOR = {
    "exits": 0,
    "orphans": 0,
    "failure": 0,
    "frames": 0,
    "deaths": 0,
    "records": 0,
    "trail": 0,
    "judge": 0,
    "verdict": 0,
    "last_words": 0,
    "ranks": 0,
    "job": 0,
    "ports": 0,
    "preflight": 0,
    "hello": 0,
    "follow": 0,
    "step": 0,
    "demos": 1,
    "config": 1,
    "site": 1,
    "queues": 1,
    "launch": 1,
    "runs": 1,
    "alone": 0,
    "progress": 1,
    "debug": 1,
    "watch": 1,
    "witness": 1,
    "group": 1,
    "digits": 1,
    "owner": 0,
    "stored": 1,
    "verify": 2,
    "checkpoints": 2,
    "report": 2,
    "steps": 2,
    "stop": 2,
    "training": 2,
    "meter": 2,
    "plot": 0,
    "forkserver": 3,
    "preload": 3,
    "rendezvous": 3,
    "agent": 3,
    "node": 3,
    "submit": 3,
    "logged": 3,
    "usage": 3,
}
DEMO_FLOOR = 3


def top_level_imports(source: str) -> Set[str]:
    """Dotted names that the module imports when it is imported itself (not inside its functions)."""
    names: Set[str] = set()
    pending: List[ast.stmt] = list(ast.parse(source).body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            pending.extend(child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt))
    return names


def faults(name: str, source: str, is_demo: bool) -> List[str]:
    """What is wrong with the imports of a module; `name` without its package."""
    found = []
    floor = DEMO_FLOOR if is_demo else FLOOR.get(name)
    if floor is None:
        return [f"core/{name}.py has no floor: give it one here"]
    for imported in sorted(top_level_imports(source)):
        package = imported.partition(".")[0]
        if package == "torch" and not is_demo and name in STANDARD_LIBRARY_ONLY | NO_TORCH:
            found.append(f"{name} imports {imported}")
        if package in ("omegaconf", "yaml") and name in STANDARD_LIBRARY_ONLY | NO_OMEGACONF:
            found.append(f"{name} imports {imported}")
        if package != "ddp_examples" or imported in ("ddp_examples", "ddp_examples.core"):
            continue
        target = imported[len(CORE) :].partition(".")[0] if imported.startswith(CORE) else ""
        if is_demo and (not target or FLOOR.get(target, 0) >= DEMO_FLOOR):
            found.append(f"the demo {name} imports {imported}")
        elif not is_demo and (not target or FLOOR.get(target, 0) > floor):
            found.append(f"core/{name} imports {imported}, which is above it")
    return found


def all_faults(package: Path) -> Dict[str, List[str]]:
    modules = dict.fromkeys(package.glob("core/[!_]*.py"), False)
    modules.update(dict.fromkeys(package.glob("[!_]*.py"), True))
    found = {path.name: faults(path.stem, path.read_text(), is_demo) for path, is_demo in modules.items()}
    return {name: wrong for name, wrong in found.items() if wrong}
