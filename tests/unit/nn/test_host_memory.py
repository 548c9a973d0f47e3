"""What the kernel says of this process's memory, and giving some of it back."""

import ctypes

import pytest

from rooflax.nn.host_memory import anonymous_bytes, give_back_freed

CHUNK, COUNT = 1 << 16, 1000


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="glibc only")
def test_what_was_freed_goes_back_to_the_system():
    """Freed chunks below one that is still in use, which glibc keeps by itself."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
    chunks = [libc.malloc(CHUNK) for _ in range(COUNT)]
    for chunk in chunks:
        ctypes.memset(chunk, 1, CHUNK)
    above = libc.malloc(CHUNK)
    for chunk in chunks:
        libc.free(chunk)
    before = anonymous_bytes()
    give_back_freed()
    after = anonymous_bytes()
    libc.free(above)
    assert before is not None and after is not None
    assert before - after > CHUNK * COUNT // 2
