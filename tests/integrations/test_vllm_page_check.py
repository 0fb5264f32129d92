"""vLLM must continue a request where its page is. Anything else is an error, at once or a step later."""

from __future__ import annotations

import pytest
import torch

from msrnn.integrations.vllm_page_check import NO_PAGE, LaterPageCheck, PageCheck


@pytest.mark.parametrize("begin", [4, 6, 11])
def test_a_page_neither_goes_back_nor_skips_tokens(begin: int) -> None:
    check = PageCheck()
    check.follow([3], [0], [5])
    with pytest.raises(RuntimeError, match=f"page 3 has read 5 tokens, and vLLM continues with token {begin}"):
        check.follow([3], [begin], [begin + 1])


def test_a_request_continues_or_begins_anew_in_any_page() -> None:
    check = PageCheck()
    check.follow([3, 7], [0, 0], [5, 9])
    check.follow([7, 3], [9, 5], [10, 6])
    check.follow([3], [0], [6])
    check.follow([3], [6], [7])


def test_padding_is_not_checked() -> None:
    """It has the null block, or no tokens."""
    check = PageCheck()
    check.follow([NO_PAGE, NO_PAGE, 4], [0, 77, 9], [5, 78, 9])
    check.follow([4], [0], [1])


def test_on_a_gpu_a_step_is_checked_when_the_next_one_begins() -> None:
    check = LaterPageCheck(4, torch.device("cpu"))
    pages = torch.tensor([3, 7], dtype=torch.int32)
    check.follow(pages, [0, 0], [5, 9])
    check.follow(pages, [5, 8], [6, 9])
    pages.zero_()  # vLLM's own buffer, which the next step overwrites
    with pytest.raises(RuntimeError, match="page 7 has read 9 tokens, and vLLM continues with token 8"):
        check.follow(pages, [6, 9], [7, 10])


@pytest.mark.gpu
def test_page_numbers_of_a_gpu() -> None:
    check = LaterPageCheck(4, torch.device("cuda"))
    pages = torch.tensor([3, 7], dtype=torch.int32, device="cuda")
    check.follow(pages, [0, 0], [5, 9])
    pages += 1
    check.follow(pages, [5, 0], [6, 9])
    with pytest.raises(RuntimeError, match="page 4 has read 0 tokens, and vLLM continues with token 5"):
        check.settle()
