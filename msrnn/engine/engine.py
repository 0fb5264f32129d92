"""The engine: continuous batching of requests, for lists of prompts and for streams."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from msrnn.checks import check_count, check_folder
from msrnn.engine.arguments import (
    check_ids,
    check_params,
    check_prompt,
    check_prompts,
    count_protected,
    list_params,
    list_protects,
)
from msrnn.engine.executor import Executor, StateHandle
from msrnn.engine.grammars import Grammars, Matcher
from msrnn.engine.loop import Loop
from msrnn.engine.offline import OnTokens, answer_all
from msrnn.engine.prefill import PrefillQueue
from msrnn.engine.prefix_cache import PrefixCache
from msrnn.engine.prefix_cache_files import PrefixCacheFiles
from msrnn.engine.requests import Event, Request, SamplingParams
from msrnn.engine.scheduler import Scheduler
from msrnn.engine.session_files import SessionInfo
from msrnn.engine.session_id import SessionId
from msrnn.engine.sessions import Sessions
from msrnn.engine.writer import Writer
from msrnn.errors import UsageError

if TYPE_CHECKING:
    from msrnn.hf.rnn import MultiStateRNN

OFFLINE_PROMPT_TOKENS = 16_384  # prefill tokens of a step, for a list of prompts
PREFIX_STATES = 8  # of the prefix cache on the device, by default
PREFIX_HOST_BYTES, PREFIX_DISK_BYTES = 2**30, 2**34
OFFLINE_ARCHIVE_BYTES = 2**34  # of cached prefixes, for a list of prompts
OFFLINE_PREFIX_STATES = 4  # for a list of prompts: a shared document, and longer prefixes of some prompts


def make_executor(rnn: MultiStateRNN | Executor, slots: int | None, others: float = 0) -> Executor:
    """The executor of an engine: the given one, or a `LocalExecutor` of the given RNN."""
    if slots is not None:
        check_count("slots", slots)
    if isinstance(rnn, Executor):
        if slots is not None:
            raise UsageError(
                f"the executor has {rnn.facts.slots} batch slots already",
                name="slots",
                value=slots,
                advice="leave slots out",
            )
        return rnn
    from msrnn.engine.local_executor import LocalExecutor  # which loads torch
    from msrnn.hf.rnn import MultiStateRNN

    if not isinstance(rnn, MultiStateRNN):
        raise UsageError(
            f"is of type {type(rnn).__name__}, and must be a MultiStateRNN or an executor",
            name="rnn",
            advice="wrap a model: MultiStateRNN(model, policy, size)",
        )
    return LocalExecutor(rnn, slots, others)


class Engine(Scheduler):
    """Answers many requests at once, each from a bounded state.

    rnn                the model, in this process; or an executor, which may compute in several processes
    slots              batch slots: answers that are generated at once; by default as many as fit, 8 on a CPU
    tokenizer          for the text of answers and for stop strings; without it, answers are tokens only
    prompt_tokens      chunked prefill: tokens that are read between two decode steps while answers are generated; by
                       default 2,048 on a GPU, 512 elsewhere
    guesses            the most tokens that are guessed at once while one answer alone is generated: what has followed
                       its last tokens before, in its prompt or in itself. All are read in one pass, and wrong ones are
                       taken back, so the answer is the same. By default none; not with recall, nor in several processes
    draft              a smaller model with the same tokens, as a MultiStateRNN, which guesses where the text does not
    prefix_bytes       bytes of the prefix cache on the model's device; 0: no prefix is cached there
    prefix_host_bytes  bytes of the prefix cache in host memory, for prefixes that no longer fit on the device
    prefix_archive_bytes  bytes of the archives of cached prefixes, where the RNN recalls; by default as many again as
                       prefix_host_bytes
    keep_ends          also cache whole prompts and answers, for conversations that are sent again; without it, only
                       prefixes that prompts share. Where the RNN recalls, only the part of a prompt before its question
                       can serve another prompt, and is cached
    prefix_folder      a folder for cached prefixes that no longer fit in host memory; without it they are deleted
    prefix_disk_bytes  bytes of the files in it
    sessions           a folder where sessions survive a restart, or another engine's sessions; None: in memory
    session_bytes      bytes of all sessions, in memory or in the folder; the least recently used one is deleted first.
                       By default 1 GiB in memory and 64 GiB in a folder
    session_days       sessions without a turn for this many days are deleted; by default none
    owns_session       whether a session is this engine's, by its name, where several engines share the folder

    `generate` answers a list of prompts. `stream` answers one and may be called many times at once: a thread then runs
    the loop, and no other code may use the model. `add` and `step` are the loop itself, for one thread at a time.
    """

    def __init__(
        self,
        rnn: MultiStateRNN | Executor,
        slots: int | None = None,
        *,
        tokenizer: Any = None,
        prompt_tokens: int | None = None,
        guesses: int = 0,
        draft: MultiStateRNN | None = None,
        prefix_bytes: int | None = None,
        prefix_host_bytes: int = PREFIX_HOST_BYTES,
        prefix_archive_bytes: int | None = None,
        keep_ends: bool = True,
        prefix_folder: str | os.PathLike[str] | None = None,
        prefix_disk_bytes: int = PREFIX_DISK_BYTES,
        sessions: str | os.PathLike[str] | Sessions | None = None,
        session_bytes: int | None = None,
        session_days: float | None = None,
        owns_session: Callable[[str], bool] = lambda _: True,
    ) -> None:
        if prompt_tokens is not None:
            check_count("prompt_tokens", prompt_tokens)
        folder = (
            None if sessions is None or isinstance(sessions, Sessions) else check_folder("sessions", Path(sessions))
        )
        prefixes_at = None if prefix_folder is None else check_folder("prefix_folder", Path(prefix_folder))
        executor = make_executor(rnn, slots)
        check_count("guesses", guesses, least=0, of="tokens")
        if guesses and not executor.facts.takes_back:
            advice = "leave it out, or use one process and no recall"
            raise UsageError("this executor cannot take tokens back", name="guesses", value=guesses, advice=advice)
        if draft is not None and not guesses:
            raise UsageError("needs guesses, the most tokens guessed at once", name="draft", advice="give guesses=8")
        self.writer = sessions.writer if isinstance(sessions, Sessions) else Writer()
        device_bytes = PREFIX_STATES * executor.facts.slot_nbytes if prefix_bytes is None else prefix_bytes
        files: PrefixCacheFiles | None = None
        if prefixes_at is not None:
            files = PrefixCacheFiles(executor, prefixes_at, prefix_disk_bytes, self.writer)
        archive_bytes = prefix_host_bytes if prefix_archive_bytes is None else prefix_archive_bytes
        prefixes = PrefixCache(executor, device_bytes, prefix_host_bytes, files, keep_ends, archive_bytes)
        if not isinstance(sessions, Sessions):
            limits: Any = {"most": session_bytes, "days": session_days, "owns": owns_session}
            sessions = Sessions(executor, folder, **limits, writer=self.writer, load=self._load_session)
        super().__init__(executor, PrefillQueue(executor, prefixes, sessions), tokenizer, prompt_tokens, guesses)
        if draft is not None:
            from msrnn.engine.draft_model import DraftModel  # which loads torch

            self.draft = DraftModel(draft, executor.facts.vocabulary, self.prompt_tokens)
        self.prefixes, self.sessions = prefixes, sessions
        self.grammars = Grammars(tokenizer, executor.facts.vocabulary, executor.stop_tokens(tokenizer))
        self._loop: Loop | None = None

    def _load_session(self, path: Path) -> StateHandle:
        return self.executor.load(path)

    def __repr__(self) -> str:
        return f"Engine({self.executor!r})"

    def warm_up(self, on_part: Callable[[str], None] | None = None) -> None:
        """Compile kernels and capture CUDA graphs, so that the first requests do not wait for it.

        `on_part` is called before each part, with its name and how many there are.
        """
        if not self.idle:
            raise UsageError("this engine is answering requests: call warm_up before the first request")
        parts = self.executor.plan_warm_up(self.prompt_tokens, self.guesses)
        for number, part in enumerate(parts, 1):
            if on_part:
                on_part(f"{part} ({number} of {len(parts)})")
            self.executor.warm_up(part)
        if self.draft is not None:
            if on_part:
                on_part("draft model")
            self.draft.warm_up(self.guesses)
        self.grammars.warm_up()

    @classmethod
    def offline(cls, rnn: MultiStateRNN | Executor, slots: int | None = None, tokenizer: Any = None) -> Engine:
        """An engine for lists of prompts: it reads each prompt at once, and caches shared prefixes only."""
        executor = make_executor(rnn, slots)
        sizes: Any = {"prefix_bytes": OFFLINE_PREFIX_STATES * executor.facts.slot_nbytes, "prefix_host_bytes": 0}
        sizes["prefix_archive_bytes"] = OFFLINE_ARCHIVE_BYTES
        return cls(executor, tokenizer=tokenizer, prompt_tokens=OFFLINE_PROMPT_TOKENS, keep_ends=False, **sizes)

    def request(
        self,
        prompt: Sequence[int] | str,
        params: SamplingParams | None = None,
        session: str | None = None,
        turns: int | None = None,
        retention: int = 0,
        owner: str = "",
        protect: int | str = "none",
        keeps_protected: bool = False,
        beginning: str = "",
        size: int | None = None,
    ) -> Request:
        """A request, checked; `add` queues it. A prompt is token ids, or text if there is a tokenizer.

        With the name of a `session`, the prompt is only the new text of that session, which is created if it does not
        exist. The session changes when the answer is finished; a request that is cancelled or fails does not change it.
        `turns` are the finished turns that the prompt follows, by default all; the request fails if the session has
        another number of turns when its prefill begins. `retention`: one event in this many tokens lists the tokens
        that the state holds. `protect`: the first tokens of the prompt, or "prompt" for all of them, are not evicted
        while the answer is generated, nor later in the session until its next turn; with `keeps_protected`, the tokens
        that earlier turns have protected stay protected in this one. `beginning`: a name for what a new session begins
        with, which it keeps. `size`: KV rows per layer that the state may hold, fewer than the engine's; a session
        keeps that of its first request. Sessions and cached prefixes belong to an `owner`,
        16 hexadecimal digits, or to no owner.
        """
        check_prompt(prompt)
        params = check_params(params)
        session_id = None if session is None else SessionId.of(SessionId(session, owner))
        vocabulary = self.executor.facts.vocabulary
        info = None if session_id is None else self.sessions.info(session_id)
        if turns is None:
            turns = info.turns if info else 0
        ids = self._encode(prompt, begins=turns == 0) if isinstance(prompt, str) else [*prompt]
        check_ids(ids, vocabulary)
        slots = self.executor.facts.slots
        if params.n > slots:
            raise UsageError(
                f"the engine has {slots} batch slots", name="n", value=params.n, advice="ask for fewer answers"
            )
        if params.stop and self.tokenizer is None:
            raise UsageError(
                "needs the text", name="stop", value=list(params.stop), advice="give the engine a tokenizer"
            )
        params.check_tokens(vocabulary)
        stops = self.list_stops(params) if params.min_tokens else ()
        if len(stops) >= vocabulary and {*range(vocabulary)} <= {*stops}:
            advice = "give fewer stop_token_ids"
            raise UsageError("every token is a stop token", name="min_tokens", value=params.min_tokens, advice=advice)
        if params.continued >= len(ids):
            raise UsageError(
                f"must be less than the {len(ids)} tokens of the prompt", name="continued", value=params.continued
            )
        matcher: Matcher | None = None
        if params.constraint is not None:
            matcher = self.grammars.start(params.constraint, ids[len(ids) - params.continued :])
        self.executor.check_length(len(ids) + params.max_tokens)
        if session is not None:
            params.check_session()
        check_count("retention", retention, 0, of="tokens")
        size = self._find_size(size, info)
        protected = count_protected(protect, len(ids))
        self.executor.check_protect(protected, size=size)
        about: Any = {"turns": turns, "created": info.created if info else None, "retention": retention}
        about |= {"protect": protected, "keeps_protected": keeps_protected, "matcher": matcher}
        about |= {"beginning": beginning, "size": size}
        return Request(ids, params, session=session_id, owner=owner, **about)

    def _find_size(self, size: int | None, session: SessionInfo | None) -> int | None:
        """The size of a request's state; None: that of the engine. A session has that of its first request."""
        whole = self.executor.facts.mean_size
        if size is not None:
            self.executor.check_size(size)
        if session is None:
            return None if size == whole else size
        has = session.size or whole
        if size not in (None, has):
            reason = f"session {session.name!r} has size {has:,} since it began"
            raise UsageError(reason, name="size", value=size, advice=f"leave it out, or give {has}")
        return session.size

    def find_longest(self, most: int) -> int:
        """The most tokens of a prompt and its answer together: `most`, or fewer if the positions end before."""
        return self.executor.find_longest(most)

    @property
    def healthy(self) -> bool:
        """Whether streams can be answered: False after several steps in a row have failed."""
        return self._loop is None or self._loop.healthy

    def _encode(self, text: str, begins: bool) -> list[int]:
        """Special tokens belong at the beginning of a text, not where a session continues."""
        if self.tokenizer is None:
            raise UsageError("a prompt of text needs a tokenizer: give the engine one, or give token ids")
        ids: list[int] = self.tokenizer(text, add_special_tokens=begins)["input_ids"]
        return ids

    def generate(
        self,
        prompts: Sequence[Sequence[int] | str],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_tokens: OnTokens = lambda _: None,
        progress: bool = True,
    ) -> list[Request]:
        """Answer all prompts; returns their requests, with `answers`, in the same order.

        `on_tokens` counts the tokens of prompts and answers as they are done. `progress` shows a bar on a terminal.
        """
        check_prompts(prompts)
        found: dict[int, Request] = {}
        with tqdm(total=len(prompts), unit="prompt", disable=None if progress else True) as bar:
            for index, request in self.answers(prompts, params, on_tokens):
                found[index] = request
                bar.update()
        return [found[index] for index in range(len(prompts))]

    def answers(
        self,
        prompts: Sequence[Sequence[int] | str],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_tokens: OnTokens = lambda _: None,
        protect: int | str | Sequence[int | str] = "none",
    ) -> Iterator[tuple[int, Request]]:
        """As `generate`, but yields each request as soon as it is finished, with the index of its prompt.

        `protect` is that of `request`, for all prompts, or a list with one for each.
        """
        check_prompts(prompts)
        many, protects = list_params(params, len(prompts)), list_protects(protect, len(prompts))
        requests = [
            self.request(prompt, some, protect=first)
            for prompt, some, first in zip(prompts, many, protects, strict=True)
        ]
        if self._loop is not None:
            raise UsageError("this engine is streaming: use another one, or `stream`")
        return answer_all(self, requests, on_tokens)

    async def stream(
        self, prompt: Sequence[int] | str | Request, params: SamplingParams | None = None, session: str | None = None
    ) -> AsyncIterator[Event]:
        """The events of one request as they come. A consumer that stops early cancels the request."""
        request = prompt if isinstance(prompt, Request) else self.request(prompt, params, session)
        if self._loop is None:
            self._loop = Loop(self)
        events = self._loop.add(request)
        try:
            unfinished = request.params.n
            while unfinished:
                event = await events.get()
                if isinstance(event, Exception):
                    raise event
                yield event
                unfinished -= event.finish_reason is not None
        finally:
            request.cancel()

    def _list_arrived(self) -> list[Request]:
        return [] if self._loop is None else self._loop.arrived

    def close(self) -> None:
        """Stop the thread that `stream` has started: cancel requests, and wait until all files are written."""
        if self._loop is not None:
            self._loop.close()
            self._loop = None
        self.writer.close()
        self.executor.close()
