"""The adaptive width against every fixed one, replayed on recorded answers at measured costs.

The text is fixed, so every policy decodes the same tokens; only its time differs. Times are those
of the calibration, without host work. The first run records the answers (minutes, one thread is
enough); the costs come from the machine's calibration, so that needs an idle machine once. What
drafts after a lead bring is replayed at made-up costs too: here they are hardly asked for.

python benchmarks/width.py
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import thread_time
from typing import Any

import common
from width_traces import MOST, Lookups, Recording, record, table_of

import dspine
from dspine.default_pair import choose_pair
from dspine.engine.adaptive import AdaptiveWidth
from dspine.engine.costs import CostTable, StepCosts
from dspine.engine.ngram_table import NgramTable
from dspine.engine.proposal import MOST as ALL
from dspine.engine.proposal import NOTHING, Ask, Proposal
from dspine.engine.width import FixedWidth, Outcome, WidthPolicy
from dspine.measured import Calibration

TRACES = common.HERE.parent / "build" / "width-traces.json.gz"
NETWORK = (1, 2, 3, 5, 7)
LOOKUPS = (1, 2, 3, 5, 8, 15)
FIRST = 3
"""Answers of a fresh engine that are looked at apart."""
CONTINUED = "dspine adaptive, continued by lookups"
APART = "adaptive, lookups, not continued"
UNFOLLOWED = "adaptive, following no lookup"
MADE_UP = {
    "16 rows cost 1.2 of one": CostTable({1: 10.0, 16: 12.0}, {2: 1.0, 8: 1.5}),
    "16 rows cost 1.5 of one": CostTable({1: 10.0, 16: 15.0}, {2: 0.5, 8: 0.8}),
}
"""Costs of no machine in particular, on which drafts are worth more."""
CUTS = (0.2, 0.3, 0.4, 0.5)
"""Chances to be reached under which a lookup is cut."""


@dataclass(frozen=True)
class Trace:
    """A recording with what the lookups propose at each of its positions."""

    recording: Recording
    free: list[list[Proposal]]
    chains: list[list[Proposal]]
    """For each of them the network's chain cut to 0, 1, 2, ... drafts, which lookups continue."""

    def led(self, index: int, lead: Proposal, asked: int) -> Proposal:
        """The lead and what the network says after it in a block of `asked` drafts."""
        count = len(lead.tokens)
        if not 0 < count < asked:
            return NOTHING
        for length, last, tokens, scores in self.recording.leads[index]:
            if (length, last) == (count, lead.tokens[-1]):
                rest = asked - count
                longer = lead._replace(own=ALL)
                return longer.continued(tokens[:rest], scores[:rest], "dspine")
        raise SystemExit(f"{self.recording.id}: the lead {lead.tokens} was not recorded")


class Cut(FixedWidth):
    """Lookups alone, as far as their stored scores reach; nothing is learned."""

    def __init__(self, least: float) -> None:
        super().__init__({"ngram": MOST})
        self._least = least

    def choose(self, drafted: Proposal, led: Proposal = NOTHING) -> Proposal:
        chosen, reached, count = super().choose(drafted, led), 1.0, 0
        for score in chosen.scores:
            reached *= score
            if reached < self._least:
                break
            count += 1
        return chosen.first(count)


class Bill:
    """Tokens and milliseconds by task."""

    def __init__(self) -> None:
        self.tokens: dict[str, int] = defaultdict(int)
        self.ms: dict[str, float] = defaultdict(float)
        self.answers: list[tuple[str, int, float]] = []
        self.steps = self.asked = self.drafts = self.led = 0
        self.proposers: Counter[str] = Counter()
        """Steps by who proposed."""
        self.policy_ms = 0.0

    def add(self, task: str, tokens: int, ms: float) -> None:
        for name in (task, "all"):
            self.tokens[name] += tokens
            self.ms[name] += ms
        self.answers.append((task, tokens, ms))

    def against(self, plain: Bill) -> dict[str, float]:
        return {name: round(plain.ms[name] / ms, 4) for name, ms in self.ms.items()}


def replay(traces: Sequence[Trace], costs: CostTable, policy: WidthPolicy, bill: Bill) -> None:
    """What the policy would have done, at these costs."""
    true = StepCosts(costs, MOST + 1)
    for trace in traces:
        recording, answer = trace.recording, trace.recording.answer
        policy.begin()
        done, waiting, ms = 0, 2, 0.0
        while done < len(answer):
            room = len(answer) - done - 1
            position = len(recording.prompt) - 1 + done
            free = [found.first(room) for found in trace.free[done]] if room else []
            started = thread_time()
            asked = min(policy.ask(free, Ask(0, position, room), waiting), room)
            drafted = led = NOTHING
            if asked:
                ms += true.draft(asked + 1, waiting, warm=True)
                waiting = 0
                drafted = trace.chains[done][asked].first(room)
                led = trace.led(done, policy.lead(), asked)
            proposal = policy.choose(drafted, led)
            chosen = proposal.tokens
            bill.policy_ms += (thread_time() - started) * 1000.0
            confirmed = tuple(answer[done : done + right(chosen, answer[done:]) + 1])
            ms += true.rows(position)[len(chosen)]
            started = thread_time()
            policy.observe(Outcome(len(chosen), confirmed))
            bill.policy_ms += (thread_time() - started) * 1000.0
            done += len(confirmed)
            waiting += len(confirmed)
            bill.steps += 1
            bill.asked += bool(asked)
            bill.drafts += len(chosen)
            bill.led += bool(led.tokens)
            bill.proposers[proposal.proposer] += 1
        bill.add(recording.task, len(answer), ms)


def right(drafts: Sequence[int], answer: Sequence[int]) -> int:
    """How many of the first drafts are right; the last token of an answer needs no draft."""
    count = 0
    while count < min(len(drafts), len(answer) - 1) and drafts[count] == answer[count]:
        count += 1
    return count


def all_knowing(traces: Sequence[Trace], costs: CostTable, bill: Bill) -> None:
    """The least time for somebody who knows the text: a bound that no policy can reach."""
    true = StepCosts(costs, MOST + 1)
    drafts = true.drafts()
    for trace in traces:
        recording, answer = trace.recording, trace.recording.answer
        least = [0.0] * (len(answer) + 1)
        for done in range(len(answer) - 1, -1, -1):
            rows = true.rows(len(recording.prompt) - 1 + done)
            rest = answer[done:]
            best = rows[0] + least[done + 1]
            for count in range(
                1, max((right(p.tokens, rest) for p in trace.free[done]), default=0) + 1
            ):
                best = min(best, rows[count] + least[done + count + 1])
            for count in range(1, longest_led(trace, done) + 1):
                best = min(best, rows[count] + drafts[count + 1] + least[done + count + 1])
            for asked, chain in enumerate(trace.chains[done][1:], 1):
                for count in range(1, right(chain.tokens, rest) + 1):
                    best = min(best, rows[count] + drafts[asked + 1] + least[done + count + 1])
            least[done] = best
        bill.add(recording.task, len(answer), least[0])


def longest_led(trace: Trace, index: int) -> int:
    """How many drafts of a lead and what follows it are right at most."""
    recording = trace.recording
    rest = recording.answer[index:]
    after = {(count, last): tokens for count, last, tokens, _ in recording.leads[index]}
    best = 0
    for found in trace.free[index]:
        for count in range(1, right(found.tokens, rest) + 1):
            tokens = after.get((count, found.tokens[count - 1]), [])
            best = max(best, right([*found.tokens[:count], *tokens], rest) if tokens else 0)
    return best


def best_of_each_answer(bills: Sequence[Bill]) -> Bill:
    """For every answer the fastest of several policies: it knows what suits the text."""
    best = Bill()
    for answers in zip(*(bill.answers for bill in bills), strict=True):
        best.add(*min(answers, key=lambda one: one[2]))
    return best


def in_hindsight(
    traces: Sequence[Trace], costs: CostTable, make: Callable[[], AdaptiveWidth]
) -> Bill:
    """A policy that has seen this very text three times: it knows its chances, not its coins."""
    bill = Bill()
    for trace in traces:
        policy = make()
        for _ in range(3):
            replay([trace], costs, policy, Bill())
        replay([trace], costs, policy, bill)
    return bill


def look_up(recording: Recording, table: NgramTable | None) -> Trace:
    """The lookups' proposals at every position."""
    lookups = Lookups(recording.prompt, table)
    free, chains = [], []
    for index, token in enumerate(recording.answer):
        free.append(lookups.here())
        chain = network_chain(recording, index)
        cuts = range(len(chain.tokens) + 1)
        chains.append([lookups.proposer.continued(chain.first(count), MOST) for count in cuts])
        lookups.on(token)
    return Trace(recording, free, chains)


def network_chain(recording: Recording, index: int) -> Proposal:
    """What the drafter says at a position of the answer."""
    return Proposal(tuple(recording.chains[index]), tuple(recording.scores[index]), "dspine")


def without_lookups(trace: Trace) -> Trace:
    """The network alone."""
    chains = [network_chain(trace.recording, index) for index in range(len(trace.free))]
    cuts = [[chain.first(count) for count in range(len(chain.tokens) + 1)] for chain in chains]
    return Trace(trace.recording, [[]] * len(trace.free), cuts)


def uncontinued(trace: Trace) -> list[list[Proposal]]:
    """What the lookups propose, table and repeats each for itself."""
    return [[found.first(found.own) for found in row] for row in trace.free]


def first_answers(
    traces: Sequence[Trace], costs: CostTable, make: Callable[[int], AdaptiveWidth], block: int
) -> dict[str, dict[str, float]]:
    """Speed of a fresh engine's first answers, all of one task, from every start of that task:
    as a multiple of plain decoding on average and at worst, and of lookups without a drafter.
    """
    found = {}
    for task in common.TASKS:
        own = [trace for trace in traces if trace.recording.task == task]
        if not own:
            continue
        ratios = []
        for start in range(len(own)):
            part = [own[(start + index) % len(own)] for index in range(FIRST)]
            bills = {"plain": Bill(), "lookups": Bill(), "auto": Bill()}
            replay(part, costs, FixedWidth({}), bills["plain"])
            replay(part, costs, make(1), bills["lookups"])
            replay(part, costs, make(block), bills["auto"])
            plain, lookups, ms = (bill.ms["all"] for bill in bills.values())
            ratios.append((plain / ms, lookups / ms))
        to_plain, to_lookups = zip(*ratios, strict=True)
        found[task] = {
            "to_plain": round(sum(to_plain) / len(own), 4),
            "to_plain_worst": round(min(to_plain), 4),
            "to_lookups": round(sum(to_lookups) / len(own), 4),
            "to_lookups_worst": round(min(to_lookups), 4),
        }
    return found


def adaptive_policy(
    costs: CostTable, block: int, curve: Sequence[float], *, follows: bool = True
) -> AdaptiveWidth:
    """The engine's policy."""
    return AdaptiveWidth(
        StepCosts(costs, MOST + 1),
        most_drafts=MOST,
        block_size=block,
        curve=curve,
        follows=follows and block > 1,
    )


def followed(
    traces: Sequence[Trace], costs: CostTable, block: int, curve: Sequence[float]
) -> dict[str, Any]:
    """What drafts after a lead bring: speed as a multiple of plain decoding, by task."""
    policies: dict[str, WidthPolicy] = {
        "plain": FixedWidth({}),
        "adaptive, lookups": adaptive_policy(costs, 1, curve),
        UNFOLLOWED: adaptive_policy(costs, block, curve, follows=False),
        "adaptive": adaptive_policy(costs, block, curve),
    }
    bills: dict[str, Bill] = {name: Bill() for name in policies}
    for name, policy in policies.items():
        replay(traces, costs, policy, bills[name])
    auto, without = bills["adaptive"], bills[UNFOLLOWED]
    return {
        "speed": {name: bill.against(bills["plain"]) for name, bill in bills.items()},
        "gain": {name: round(ms / auto.ms[name], 4) for name, ms in without.ms.items()},
        "asked_share": round(auto.asked / auto.steps, 4),
        "led_share": round(auto.led / auto.steps, 4),
        "proposers": dict(auto.proposers.most_common()),
    }


def compare(
    traces: Sequence[Trace], costs: CostTable, block: int, curve: Sequence[float]
) -> dict[str, Any]:
    """Speed of every policy as a multiple of plain decoding, by task."""

    def adaptive(size: int = block) -> AdaptiveWidth:
        return adaptive_policy(costs, size, curve)

    policies: dict[str, WidthPolicy] = {"plain": FixedWidth({})}
    policies |= {f"dspine {n}": FixedWidth({"dspine": n}) for n in NETWORK if n < block}
    policies |= {f"lookup {n}": FixedWidth({"ngram": n}) for n in LOOKUPS}
    policies |= {f"lookup cut at {least}": Cut(least) for least in CUTS}
    policies |= {"dspine adaptive": adaptive(), CONTINUED: adaptive()}
    policies |= {APART: adaptive(1), "adaptive, lookups": adaptive(1)}
    policies |= {UNFOLLOWED: adaptive_policy(costs, block, curve, follows=False)}
    policies |= {"adaptive": adaptive()}
    bare = [without_lookups(trace) for trace in traces]
    special = {
        CONTINUED: [Trace(one.recording, [[]] * len(one.free), one.chains) for one in traces],
        APART: [Trace(one.recording, uncontinued(one), one.chains) for one in traces],
    }
    bills: dict[str, Bill] = {}
    for name, policy in policies.items():
        bill = bills[name] = Bill()
        usual = bare if name.startswith("dspine") else traces
        replay(special.get(name, usual), costs, policy, bill)
    widths = [name for name in bills if "adaptive" not in name]
    fixed = min(widths, key=lambda name: bills[name].ms["all"])
    widths = [name for name in widths if name == "plain" or name.startswith("dspine")]
    fixed_alone = min(widths, key=lambda name: bills[name].ms["all"])
    alone = bills["dspine adaptive"]
    each = bills["dspine, best of each answer"] = best_of_each_answer(
        [bills[name] for name in widths]
    )
    bills["in hindsight"] = in_hindsight(traces, costs, adaptive)
    bills["all-knowing"] = Bill()
    all_knowing(traces, costs, bills["all-knowing"])
    auto = bills["adaptive"]
    return {
        "first_answers": first_answers(traces, costs, adaptive, block),
        "speed": {name: bill.against(bills["plain"]) for name, bill in bills.items()},
        "best_fixed": fixed,
        "adaptive_to_lookups": round(bills["adaptive, lookups"].ms["all"] / auto.ms["all"], 4),
        "adaptive_to_best_fixed": round(bills[fixed].ms["all"] / auto.ms["all"], 4),
        "adaptive_to_hindsight": round(bills["in hindsight"].ms["all"] / auto.ms["all"], 4),
        "adaptive_to_all_knowing": round(bills["all-knowing"].ms["all"] / auto.ms["all"], 4),
        "dspine_best_fixed": fixed_alone,
        "dspine_adaptive_to_best_fixed": round(bills[fixed_alone].ms["all"] / alone.ms["all"], 4),
        "dspine_adaptive_to_best_of_each_answer": round(each.ms["all"] / alone.ms["all"], 4),
        "dspine_asked_share": round(alone.asked / alone.steps, 4),
        "asked_share": round(auto.asked / auto.steps, 4),
        "led_share": round(auto.led / auto.steps, 4),
        "proposers": dict(auto.proposers.most_common()),
        "drafts_a_step": round(auto.drafts / auto.steps, 3),
        "policy_us_a_step": round(auto.policy_ms / auto.steps * 1000.0, 1),
    }


def main() -> None:
    """Record what is missing, measure costs, replay; the last line is one JSON document."""
    parser = common.parser(__doc__.split("\n")[0])
    parser.add_argument("--traces", type=Path, default=TRACES, help="recorded answers, added to")
    parser.add_argument("--costs", type=Path, help="a calibration that was kept, to use its times")
    arguments = parser.parse_args()
    pair = choose_pair(arguments.model, arguments.model_draft)
    recordings = record(
        arguments.traces,
        common.prompts(count=arguments.count),
        predict=arguments.predict,
        model=pair[0],
        drafter=pair[1],
        threads=arguments.threads or 1,
    )
    if arguments.costs is not None:
        calibration = Calibration.from_json(json.loads(arguments.costs.read_text("utf-8")))
        costs = calibration.costs(max(calibration.rows_ms))
    else:
        with dspine.load(*pair, n_threads=arguments.threads) as engine:
            measured, plan = engine.calibration, engine.plan
        assert measured is not None and plan is not None
        calibration, costs = measured, measured.costs(plan.flash_attention)
    assert pair[1] is not None
    table = table_of(pair[1])
    # Tasks in turn, as users come: a policy that carries over from one prompt to the next.
    order = sorted(recordings, key=lambda one: (one.id.split("-")[-1].rjust(9, "0"), one.task))
    traces = [look_up(one, table) for one in order]
    curve = _curve(pair[1])
    block = len(recordings[0].chains[0]) + 1
    parts = {"all prompts": traces, "every second prompt of a task": _second(traces)}
    results = {name: compare(part, costs, block, curve) for name, part in parts.items()}
    leads = {
        name: followed(traces, known, block, curve)
        for name, known in {"this machine": costs, **MADE_UP}.items()
    }
    document = {
        "costs": calibration.to_json(),
        "tokens": sum(len(one.answer) for one in recordings),
        "results": results,
        "leads": leads,
    }
    _report(results)
    _report(leads)
    common.save("width", document, arguments.output)
    print(json.dumps({name: part["speed"]["adaptive"] for name, part in results.items()}))


def _curve(drafter: Path) -> tuple[float, ...]:
    from dspine.files.drafter_file import read_drafter

    return read_drafter(drafter).record.acceptance_curve


def _second(traces: Sequence[Trace]) -> list[Trace]:
    by_task: dict[str, list[Trace]] = defaultdict(list)
    for trace in traces:
        by_task[trace.recording.task].append(trace)
    kept = {id(trace) for group in by_task.values() for trace in group[1::2]}
    return [trace for trace in traces if id(trace) in kept]


def _report(results: dict[str, Any]) -> None:
    for name, part in results.items():
        columns = (*common.TASKS, "all")
        rows = [
            [policy, *(f"{speeds[task]:.3f}" for task in columns)]
            for policy, speeds in part["speed"].items()
        ]
        print(common.table([f"{name}, times plain", *columns], rows))
        facts = {key: value for key, value in part.items() if key != "speed"}
        print(json.dumps(facts))


if __name__ == "__main__":
    main()
