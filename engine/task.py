"""What a prompt asks for: each kind of task is calibrated, and audited, by itself."""

from typing import Literal, get_args

from cache_store.errors import UsageError

Task = Literal["qa", "summary"]
TASKS: tuple[Task, ...] = get_args(Task)


def check_task(name: str) -> Task:
    """Raises UsageError for a task nobody knows."""
    known = next((task for task in TASKS if task == name), None)
    if known is None:
        raise UsageError(f"task {name!r} is unknown", "use one of " + ", ".join(TASKS))
    return known
