"""The thread that tells rank 0 what this process does when others wait for it: see csrc/torch/stacks.h."""

from __future__ import annotations

import sys
import threading
import traceback

from . import _core

_FRAMES = 24  # of a thread, the innermost
_LONGEST = 7000  # characters

_thread: threading.Thread | None = None


def start() -> None:
    """Starts the thread, once per process."""
    global _thread
    if _thread is not None and _thread.is_alive():
        return
    ready = threading.Event()

    def serve() -> None:
        ready.set()
        _core.serve_stacks(describe, threading.main_thread().ident or 0, threading.get_ident())

    _thread = threading.Thread(target=serve, name="fusewire-stacks", daemon=True)
    _thread.start()
    ready.wait()


def stop() -> None:
    """Ends the thread."""
    global _thread
    thread, _thread = _thread, None
    if thread is not None:
        _core.stop_stacks()
        thread.join(timeout=1)


def describe() -> str:
    """The Python stacks of this process's threads as text, the main thread first, without this one."""
    frames = sys._current_frames()
    own, main = threading.get_ident(), threading.main_thread().ident
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    text = ""
    for ident in sorted(frames, key=lambda i: i != main):
        if ident == own:
            continue
        stack = traceback.extract_stack(frames[ident])
        head = f"thread {names.get(ident, ident)} (most recent call last):\n"
        cut = f"  ... {len(stack) - _FRAMES} more\n" if len(stack) > _FRAMES else ""
        text += head + cut + "".join(traceback.format_list(stack[-_FRAMES:]))
        if len(text) > _LONGEST:
            break
    return text
