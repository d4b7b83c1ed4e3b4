"""The digests of prompts: what they are made of, and that engine and gateway come to the same."""

from __future__ import annotations

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.prefix_cache import PrefixCache
from engine.prefix_digests import SPAN_BLOCKS, block_digests, root_digest, span_key, span_keys
from engine.protocol import SamplingParams, cache_namespace
from engine.sequence import Sequence


def test_a_digest_is_of_the_salt_and_all_text_up_to_the_blocks_end() -> None:
    root = hashlib.blake2b(b"org-1", digest_size=32).digest()
    assert root_digest("org-1") == root
    ids = bytes([1, 0, 0, 0, 0, 2, 0, 0])
    first, second = block_digests(root, [1, 512, 1, 512, 7], 2)
    assert first == hashlib.blake2b(root + ids, digest_size=32).digest()
    assert second == hashlib.blake2b(root + ids + ids, digest_size=32).digest()
    assert first.hex() == ("5dce0fc0982cf81a0ba090e01e1147163cfea5d27737c4a1e70ab03294bbe694"), (
        "blocks are addressed by this across processes: changing it loses every exported block"
    )


def test_the_digest_of_a_span_is_what_the_next_one_hangs_on() -> None:
    ids = [*range(2 * SPAN_BLOCKS)]
    end = block_digests(root_digest("s"), ids[:SPAN_BLOCKS], 1)[-1]
    other = block_digests(end, ids[SPAN_BLOCKS:], 1)[-1]
    keys = [int.from_bytes(span_key(each), "little") for each in (end, other)]
    assert span_keys("s", ids, 1) == tuple(keys)
    assert span_keys("s", [*ids, 5], 1) == tuple(keys), "a part of a span has no key"
    assert span_keys("s", ids[: SPAN_BLOCKS - 1], 1) == ()


@given(
    prompt=st.lists(st.integers(0, 2**32 - 1), max_size=60),
    asked=st.lists(st.integers(0, 40), max_size=5),
    said=st.integers(0, 30),
)
def test_engine_and_gateway_come_to_the_same_keys(
    prompt: list[int], asked: list[int], said: int
) -> None:
    """In whatever order the engine asks for its blocks, and of what was said, too."""
    cache = PrefixCache(BlockPool(1), 2)
    seq = Sequence(
        request_id="r",
        index=0,
        order=(0, 0),
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=1),
        seed=0,
        cache_salt="salt",
    )
    seq.output_token_ids += range(said)
    num_full = seq.num_tokens // 2
    for index in (*asked, num_full - 1):
        if 0 <= index < num_full:
            cache.digest(seq, index)
    ends = seq.block_digests[SPAN_BLOCKS - 1 :: SPAN_BLOCKS]
    keys = tuple(int.from_bytes(span_key(each), "little") for each in ends)
    assert len(seq.block_digests) == num_full and keys == span_keys("salt", seq.token_ids, 2)


def test_no_tenant_and_no_adapter_has_the_keys_of_another() -> None:
    """A tenant that knows another's whole prompt still cannot find out where it is cached."""
    ids = [*range(3 * SPAN_BLOCKS)]
    namespaces = (cache_namespace(salt, each) for salt in ("org-a", "org-b") for each in ("", "x"))
    found = [set(span_keys(each, ids, 1)) for each in namespaces]
    assert [len(each) for each in found] == [3] * 4
    assert len(set.union(*found)) == 12
