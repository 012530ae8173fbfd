"""Checks of every operation of a connection."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

from rootlace.runtime.engine.client.restarts import MAX_GUILTY
from rootlace.runtime.server.tokenizer import Piece
from rootlace.wire import protocol
from rootlace.wire.protocol import Chunk, Failed, Generated, SamplingParams
from tests.deterministic import reference, tokens
from tests.deterministic.client import Sent
from tests.deterministic.clock import SEED_OF_THE_GATEWAY
from tests.deterministic.engine import CONTEXT_LENGTH, INJECTED
from tests.deterministic.reference import Content
from tests.deterministic.violation import Found, Held, Pinned, Violation

if TYPE_CHECKING:
    from tests.deterministic.actor import Actor
    from tests.deterministic.world import World

DIED = "the engine died twice"
LONGEST = 240.0
"""Seconds that no operation takes, whatever happens to engines and lines."""
STUCK = 620.0
"""Seconds more for each time that a loop stands still."""
EARLY = 1e-6
"""Seconds: rounding of clocks."""
LEEWAY = 2.0
"""Seconds that the answer to an operation may be told later than its time ends: it goes through the
disk of `--state` first."""


class Branch:
    """Branch in the reference."""

    def __init__(self, content: Content, namespace: str = "", share: bool = True) -> None:
        self.content = content
        self.namespace = namespace
        self.share = share
        self.tree: Hashable = namespace if share else self
        """Owner of the cache that the branch sees: the namespace, or the branch alone."""
        self.broken = False
        self.deadly = False
        """Whether its text kills engines or makes steps raise."""


class Ledger:
    """Checks the operations of one connection in their order."""

    def __init__(self, world: World, actor: Actor, life: int) -> None:
        self._world = world
        self._actor = actor
        self._life = life
        self._branches: dict[int, Branch] = {}
        shape = world.scenario.shape
        self._capacity = min(CONTEXT_LENGTH, shape.blocks * shape.block_size)
        self._pinned = int(0.5 * shape.blocks) * shape.block_size

    def check(self, operations: list[Sent]) -> None:
        self._cancels = {
            sent.op.branch: sent.op.op
            for sent in operations
            if isinstance(sent.op, protocol.Cancel)
        }
        ended: dict[int, tuple[float, int]] = {}
        for sent in operations:
            self._check_events(sent)
            branch = getattr(sent.op, "branch", None)
            if branch is None or sent.ended is None or isinstance(sent.op, protocol.Cancel):
                pass
            elif not (sent.failure and sent.failure.code == "unavailable"):
                before = ended.get(branch)
                if before is not None and before[0] > sent.ended:
                    self._wrong(sent, f"ended before operation {before[1]} of its branch")
                ended[branch] = sent.ended, sent.op.op
            self._check(sent)

    def _wrong(self, sent: Sent, what: str) -> None:
        raise Violation(
            f"client {self._actor.number}, connection {self._life}, sent at {sent.at:.4f}: "
            f"{sent.op}: {what}; it ended at {sent.ended} with {sent.end}"
        )

    def _check_events(self, sent: Sent) -> None:
        ends = [event for event in sent.events if not isinstance(event, Chunk)]
        if len(ends) != 1 or sent.events[-1] is not ends[0]:
            self._wrong(sent, f"{len(ends)} terminal events among {len(sent.events)}")
        assert sent.ended is not None
        # A stalled loop may be a long step, so ten minutes pass before it is noticed.
        stuck = sum(fault.kind == "stick" for fault in self._world.scenario.faults)
        longest = LONGEST + stuck * STUCK
        if sent.ended - sent.at > longest:
            self._wrong(sent, f"it took more than {longest:g} seconds")

    # ------------------------------------------------------------ one operation

    def _check(self, sent: Sent) -> None:
        op, failure = sent.op, sent.failure
        if isinstance(op, protocol.Open):
            self._check_open(sent, op)
            return
        branch_id = getattr(op, "branch", None)
        if branch_id is None:
            self._check_free(sent)
            return
        branch = self._branches[branch_id]
        if isinstance(op, protocol.Close | protocol.Cancel):
            if failure is not None and not self._lost(sent):
                self._wrong(sent, "it cannot fail")
            if isinstance(op, protocol.Cancel):
                branch.broken = True
            return
        if branch.broken:
            if failure is None or not (failure.code == "cancelled" or self._lost(sent)):
                self._wrong(sent, "its branch was broken")
            return
        if failure is not None and self._lost(sent):
            branch.broken = True
            return
        if failure is not None and failure.code == "cancelled":
            branch.broken = True
            if self._cancels.get(branch_id, 0) < op.op and not self._quotes_broken(op):
                self._wrong(sent, "nobody cancelled it")
            return
        getattr(self, f"_check_{type(op).__name__.lower()}")(sent, op, branch)
        if failure is not None:
            branch.broken = True

    def _lost(self, sent: Sent) -> bool:
        """Whether an operation could fail by a lost connection, or by an engine that is gone for
        good. After a full disk, a server may have less than its client, and must report that."""
        if sent.failure is not None and sent.failure.code == "state_lost":
            return self._world.filled
        possible = self._world.gone or (self._world.shaken and sent.lost)
        return sent.failure is not None and sent.failure.code == "unavailable" and bool(possible)

    def _quotes_broken(self, op: protocol.Op) -> bool:
        if not isinstance(op, protocol.Append):
            return False
        quoted = [part.branch for part in op.parts if isinstance(part, protocol.Quote)]
        return any(self._branches[one].broken or self._cancels.get(one) for one in quoted)

    def _check_open(self, sent: Sent, op: protocol.Open) -> None:
        failure = sent.failure
        parent = None if op.parent is None else self._branches[op.parent]
        if parent is None:
            branch = Branch(Content(), op.namespace, op.share)
        else:
            branch = Branch(parent.content.fork(), parent.namespace, parent.share)
            branch.deadly = parent.deadly
            branch.tree = parent.tree
        self._branches[op.branch] = branch
        if failure is None:
            if parent is not None and parent.broken:
                self._wrong(sent, "its parent was broken")
            return
        branch.broken = True
        if self._lost(sent):
            return
        excused = op.parent is not None and op.op < self._cancels.get(op.parent, 0)
        excused |= op.op < self._cancels.get(op.branch, 0)
        excused |= parent is not None and parent.broken
        if failure.code != "cancelled" or not excused:
            self._wrong(sent, "it cannot fail")

    def _check_free(self, sent: Sent) -> None:
        failure = sent.failure
        if failure is None or self._lost(sent):
            return
        if failure.code == "unavailable" and self._disturbed():
            return
        if isinstance(sent.op, protocol.Unpin) and failure.code == "invalid_request":
            return
        self._wrong(sent, "it cannot fail")

    def _disturbed(self) -> bool:
        """Whether a question to the engine may get no answer, since the engine died or stalled."""
        kinds = {fault.kind for fault in self._world.scenario.faults}
        return bool(self._world.killed or kinds & {"suspend", "stick", "jump"}) or any(
            process.poisoned for process in self._world.processes
        )

    # ------------------------------------------------------------ by kind

    def _check_append(self, sent: Sent, op: protocol.Append, branch: Branch) -> None:
        content, failure = branch.content, sent.failure
        for part in op.parts:
            if isinstance(part, protocol.Text):
                branch.deadly |= part.special
                content.add(Piece(part.text, part.special))
            elif isinstance(part, protocol.Tokens):
                content.add_ids(part.ids)
            elif isinstance(part, protocol.Quote):
                quoted = self._branches[part.branch]
                if quoted.broken:
                    branch.broken = True
                    if failure is None:
                        self._wrong(sent, "it quotes a broken branch")
                    return
                branch.deadly |= quoted.deadly
                for piece in quoted.content.gained_text():
                    content.add(piece)
        if failure is None:
            return
        too_long = len(content.whole()) > self._capacity
        if failure.code != "context_length_exceeded" or not too_long:
            self._wrong(sent, "it cannot fail")

    def _check_prefill(self, sent: Sent, op: protocol.Prefill, branch: Branch) -> None:
        prompt = branch.content.whole()
        self._note(sent, branch, prompt)
        length, end = len(prompt), sent.end
        if isinstance(end, Failed):
            self._excuse(sent, branch, length)
        elif not isinstance(end, protocol.Done) or end.usage is None:
            self._wrong(sent, "no usage")
        elif not 0 <= end.usage.cached_tokens <= end.usage.prompt_tokens <= length:
            self._wrong(sent, f"usage {end.usage}, {length} tokens")

    def _check_explain(self, sent: Sent, op: protocol.Explain, branch: Branch) -> None:
        length = len(branch.content.whole())
        end = sent.end
        if isinstance(end, Failed):
            asked = end.code == "unavailable" and self._disturbed()
            if not asked and (length or end.code != "invalid_request"):
                self._wrong(sent, "it cannot fail")
        elif not isinstance(end, protocol.Explained) or end.report.limit != length - 1:
            self._wrong(sent, f"it has {length} tokens")

    def _check_select(self, sent: Sent, op: protocol.Select, branch: Branch) -> None:
        content = branch.content
        wanted = reference.selected(content, op.choices)
        length = max(len(content.whole(Piece(choice))) for choice in op.choices)
        for choice in op.choices:
            self._note(sent, branch, content.whole(Piece(choice)))
        end = sent.end
        if isinstance(end, Failed):
            if wanted is not None or end.code != "invalid_request":
                self._excuse(sent, branch, length)
            return
        if not isinstance(end, protocol.Selected) or wanted is None:
            self._wrong(sent, "a choice adds no token")
        best, scores = wanted
        close = all(abs(a - b) < 1e-4 for a, b in zip(end.scores, scores, strict=True))
        if end.index != best or not close:
            self._wrong(sent, f"choice {best} with {scores} was to be selected")
        content.begin = content.begin is not False
        piece = Piece(op.choices[best])
        content.pending.append(piece)
        content.gained.append(piece)

    def _check_generate(self, sent: Sent, op: protocol.Generate, branch: Branch) -> None:
        content = branch.content
        content.settle()
        prompt = list(content.ids)
        self._note(sent, branch, prompt, grows=True)
        end = sent.end
        expected = [self._expected(prompt, op, index) for index in range(op.params.n)]
        if isinstance(end, Failed):
            codes = {one.code for one in expected}
            if end.code not in codes or not end.code:
                self._excuse(sent, branch, len(prompt) + 1)
            return
        if not isinstance(end, Generated):
            self._wrong(sent, "not a result")
        self._check_deadline(sent, op)
        if len(end.outputs) != len(expected):
            self._wrong(sent, f"{len(expected)} samples were asked for")
        for index, output in enumerate(end.outputs):
            if expected[index].code:
                self._wrong(sent, f"it must fail with {expected[index].code}")
            if self._cut_by_pins(prompt, output, expected[index]):
                expected[index] = self._sample(prompt, op, index, len(output.token_ids))
            wanted = expected[index]
            got = (list(output.token_ids), output.finish_reason, output.matched, output.text)
            if got != (wanted.ids, wanted.finish, wanted.matched, wanted.text):
                self._wrong(sent, f"behind {prompt} it was to be {wanted}")
            if op.params.logprobs:
                found = [one.logprob for one in output.logprobs]
                if found != reference.logprobs(prompt, list(output.token_ids)):
                    self._wrong(sent, "other log-probabilities")
        if end.facts.pin and branch.share:
            assert sent.ended is not None
            self._world.pinned.append(Pinned(end.facts.pin, sent.at, sent.ended))
        elif op.handling.cache.pin is True:
            self._wrong(sent, "it was to be pinned")
        usage = end.usage
        if usage.prompt_tokens != len(prompt) or not 0 <= usage.cached_tokens <= len(prompt):
            self._wrong(sent, f"a prompt of {len(prompt)} tokens, and {usage}")
        whole = all(at > sent.ended for at in self._world.losses() if sent.ended is not None)
        if op.params.n == 1 and whole:
            cached = usage.cached_tokens
            self._world.found.append(Found(sent, branch.tree, prompt, cached))
        if op.stream:
            self._check_chunks(sent, end)
        first = expected[0]
        content.ids += first.kept
        content.pending = [Piece(first.rest)] if first.rest else []
        if first.text:
            content.gained.append(Piece(first.text))

    def _note(self, sent: Sent, branch: Branch, prompt: list[int], grows: bool = False) -> None:
        self._world.held.append(Held(sent, branch.tree, prompt, grows))

    def _check_deadline(self, sent: Sent, op: protocol.Generate) -> None:
        """The deadline counts from the gateway's receipt. It cannot be reported while nothing runs,
        or the client reads nothing."""
        timeout, world = op.handling.timeout, self._world
        told = world.told.get((sent.socket, op.op))
        if timeout is None or not told:
            return
        came = world.network.arrival(sent.socket, op.op)
        pauses = sum(max(0.0, min(end, told[0]) - max(at, came)) for at, end in world.pauses)
        if told[0] - came - pauses > timeout + LEEWAY:
            self._wrong(sent, f"it came at {came}, and its time was over before {told[0]}")

    def _expected(self, prompt: list[int], op: protocol.Generate, index: int) -> reference.Expected:
        return self._sample(prompt, op, index, min(self._most(op), self._capacity - len(prompt)))

    def _most(self, op: protocol.Generate) -> int:
        assert op.params.max_tokens is not None
        return op.params.max_tokens

    def _sample(
        self, prompt: list[int], op: protocol.Generate, index: int, most: int
    ) -> reference.Expected:
        if not prompt:
            return reference.Expected([], code="invalid_request")
        if most < 1:
            return reference.Expected([], code="context_length_exceeded")
        given, constraint = op.params, op.constraint
        if constraint == tokens.CONSTRAINTS["explodes"]:
            return reference.Expected([], code="invalid_constraint")
        seed = SEED_OF_THE_GATEWAY if given.seed is None else given.seed
        params = SamplingParams(
            temperature=given.temperature,
            seed=seed + index,
            stop=given.stop,
            stop_token_ids=given.stop_token_ids,
            min_tokens=min(given.min_tokens, most),
            ignore_eos=given.ignore_eos,
        )
        grammar = None if constraint is None else self._world.compiler.compile(constraint)
        jumps = constraint is not None and constraint.jump_forward != "off"
        return reference.generated(prompt, params, most, grammar, jumps)

    def _cut_by_pins(
        self, prompt: list[int], output: protocol.Output, wanted: reference.Expected
    ) -> bool:
        """Whether pins ended the output early, by its length."""
        length = len(prompt) + len(output.token_ids)
        shape = self._world.scenario.shape
        most = shape.blocks * shape.block_size - self._pinned - shape.block_size
        early = output.finish_reason == "length" and len(output.token_ids) < len(wanted.ids)
        return early and self._world.pins and length >= most

    def _check_chunks(self, sent: Sent, end: Generated) -> None:
        chunks = [event for event in sent.events if isinstance(event, Chunk)]
        for index, output in enumerate(end.outputs):
            mine = [chunk for chunk in chunks if chunk.index == index]
            if "".join(chunk.text for chunk in mine) != output.text:
                self._wrong(sent, f"the chunks of sample {index} are another text: {mine}")
            ids = [token for chunk in mine for token in chunk.token_ids]
            if ids != list(output.token_ids)[: len(ids)]:
                self._wrong(sent, f"the chunks of sample {index} are other tokens: {mine}")

    # ------------------------------------------------------------ excuses

    def _hopeless(self, timeout: float) -> bool:
        """Whether an operation took so long that the scheduler could refuse a deadline.

        The scheduler expects 1.5 times nearly the longest duration so far.
        """
        longest = max(
            (
                one.ended - one.at
                for actor in self._world.actors
                for one in actor.sent
                if one.ended is not None
                and isinstance(one.op, protocol.Generate | protocol.Prefill | protocol.Select)
            ),
            default=0.0,
        )
        return timeout < 6 * longest

    def _killed(self) -> int:
        """Count the connection's requests that could be blamed for killing engines."""
        count = 0
        for sent in self._actor.sent:
            if sent.life == self._life and sent.failure and DIED in sent.failure.message:
                alone = isinstance(sent.op, protocol.Prefill) or (
                    isinstance(sent.op, protocol.Generate) and sent.op.params.n == 1
                )
                count += 1 if alone else MAX_GUILTY  # an operation of several requests
        return count

    def _excuse(self, sent: Sent, branch: Branch, length: int) -> None:
        """Check that the failure of a computing operation had a reason."""
        failure, op = sent.failure, sent.op
        assert failure is not None and sent.ended is not None
        code, timeout = failure.code, op.handling.timeout
        if code == "deadline_impossible" and timeout is not None:
            if self._hopeless(timeout):
                return
            self._wrong(sent, "others took far less than its timeout")
        if code == "client_suspended" and self._killed() >= MAX_GUILTY:
            return
        if code == "deadline_exceeded" and timeout is not None:
            if sent.ended - sent.at < timeout - EARLY:
                self._wrong(sent, "its time was not over")
            return
        if code == "pin_refused" and op.handling.cache.pin is True:
            return
        if code == "context_length_exceeded":
            most = self._capacity - (self._pinned if self._world.pins else 0)
            if length > most:
                return
        if code == "invalid_request" and op.handling.cache.pin and not branch.share:
            return
        if code in ("internal", "ends_engine") and branch.deadly:
            return
        if code == "internal" and INJECTED in failure.message:
            return
        if code == "ends_engine" and DIED in failure.message:
            # A request alone at one engine's death, after another's, looks like a killer.
            deaths, killed = (
                [at for at in when if sent.at <= at <= sent.ended]
                for when in (self._world.deaths, self._world.killed)
            )
            if len(deaths) >= 2 and killed:
                return
        self._wrong(sent, "there is no reason")
