import type { MachineTimeline, Span } from "../api/types";
import type { Domain } from "./axis";

/** State to show: a machine that ended was lost without a notice, evicted, released, or given to
 * another job. */
export type Shown = Span["state"] | "evicted" | "gone" | "given";

export type Bar = { state: Shown; x: number; width: number; from: number; to: number };

export type Lane = { timeline: MachineTimeline; y: number; bars: Bar[]; lostAt: number };

export type Arrow = { from: string; to: string; x1: number; y1: number; x2: number; y2: number };

/** Machines lost at about the same time, as in most spot reclamations. */
export type Bulk = { at: number; machines: string[]; x: number; width: number };

export type Layout = {
  lanes: Lane[];
  arrows: Arrow[];
  bulks: Bulk[];
  height: number;
  from: number;
  to: number;
};

export const LANE = 38;
export const BAR_PAD = 12;
/** Minimum width in pixels, because a loss has no duration. */
const MIN_WIDTH = 6;
/** Losses within this time are a bulk if they are this many, and this fraction of all machines. */
const BULK_SECONDS = 30;
const BULK_MACHINES = 3;
const BULK_FRACTION = 0.2;

/** Returns the times that the machines' states cover, from `since` if that is earlier. */
export function extent(machines: readonly MachineTimeline[], now: number, since = now): Domain {
  const from = Math.min(
    now,
    since,
    ...machines.flatMap((each) => each.spans.map((span) => span.from)),
  );
  const ends = machines.flatMap((each) => each.spans.map((span) => span.to ?? now));
  return { from, to: Math.max(from + 1, now, ...ends) };
}

/** Lays out the machines' states in pixels; open spans end at `now`. */
export function layout(
  machines: readonly MachineTimeline[],
  width: number,
  now: number,
  { from, to }: Domain = extent(machines, now),
): Layout {
  const x = (at: number) => ((at - from) / (to - from)) * width;
  const lanes = machines.map((timeline, row) => lane(timeline, row * LANE, x, width, now));
  const bulkLosses = bulks(machines, now)
    .filter(({ at, until }) => until >= from && at <= to)
    .map(({ at, until, lost }) => ({
      at,
      machines: lost,
      x: Math.min(x(at), width - MIN_WIDTH),
      width: Math.max(MIN_WIDTH, x(until) - x(at)),
    }));
  const height = lanes.length * LANE;
  const shown = arrows(lanes).filter(({ x1, x2 }) => x1 >= 0 && x2 <= width);
  return { lanes, arrows: shown, bulks: bulkLosses, height, from, to };
}

function lane(
  timeline: MachineTimeline,
  y: number,
  x: (at: number) => number,
  width: number,
  now: number,
): Lane {
  const bars = timeline.spans.flatMap((span): Bar[] => {
    const to = span.state === "dead" ? span.from : (span.to ?? now);
    const [start, end] = [x(span.from), x(to)];
    if (end < 0 || start > width) return [];
    const left = Math.min(Math.max(0, start), width - MIN_WIDTH);
    const long = Math.max(MIN_WIDTH, Math.min(width, end) - left);
    return [{ state: shown(timeline, span), x: left, width: long, from: span.from, to }];
  });
  // The replacement is ordered when the loss is known, which can be before the end.
  const loss = timeline.spans.find((span) => span.state === "notice" || span.state === "dead");
  return { timeline, y, bars, lostAt: x(loss?.from ?? now) };
}

/** Returns the bulk losses with their times and machines. */
export function bulks(
  machines: readonly MachineTimeline[],
  now: number,
): { at: number; until: number; lost: string[] }[] {
  const deaths = machines
    .flatMap((each) => {
      const at = lostAt(each);
      return at === null ? [] : [{ at, name: each.machine }];
    })
    .sort((a, b) => a.at - b.at);
  const groups: { at: number; until: number; lost: string[] }[] = [];
  for (const { at, name } of deaths) {
    const last = groups.at(-1);
    if (last && at - last.at <= BULK_SECONDS) {
      last.until = at;
      last.lost.push(name);
    } else groups.push({ at, until: at, lost: [name] });
  }
  return groups.filter(
    ({ at, lost }) =>
      lost.length >= BULK_MACHINES && lost.length >= BULK_FRACTION * present(machines, at, now),
  );
}

function lostAt(timeline: MachineTimeline): number | null {
  const dead = timeline.lost ? timeline.spans.find((span) => span.state === "dead") : undefined;
  return dead?.from ?? null;
}

function present(machines: readonly MachineTimeline[], at: number, now: number): number {
  return machines.filter(({ spans }) => {
    const last = spans.at(-1);
    const end = last?.state === "dead" ? last.from : (last?.to ?? now);
    return (spans[0]?.from ?? now) <= at && end >= at;
  }).length;
}

function arrows(lanes: Lane[]): Arrow[] {
  const byName = new Map(lanes.map((each) => [each.timeline.machine, each]));
  return lanes.flatMap((lane) => {
    const next = lane.timeline.replaced_by ? byName.get(lane.timeline.replaced_by) : undefined;
    const first = next?.bars[0];
    if (!next || !first) return [];
    return [
      {
        from: lane.timeline.machine,
        to: next.timeline.machine,
        x1: lane.lostAt,
        y1: lane.y + LANE - BAR_PAD,
        x2: first.x,
        y2: next.y + BAR_PAD,
      },
    ];
  });
}

/** A lost machine: when, and whether its cloud gave notice. */
export type Loss = { at: number; machine: string; state: "evicted" | "dead" };

/** Returns the losses in the order of their times. */
export function losses(machines: readonly MachineTimeline[]): Loss[] {
  return machines
    .flatMap((each) => {
      const at = lostAt(each);
      return at === null ? [] : [{ at, machine: each.machine, state: endOf(each) } as Loss];
    })
    .sort((a, b) => a.at - b.at);
}

/** Returns the state to show; one that the controller terminated is "gone". */
export function stateOf(timeline: MachineTimeline): Shown {
  const last = timeline.spans.at(-1);
  if (!last || (last.to !== null && last.state !== "dead")) {
    return timeline.given_to ? "given" : "gone";
  }
  return shown(timeline, last);
}

function shown(timeline: MachineTimeline, span: Span): Shown {
  return span.state === "dead" ? endOf(timeline) : span.state;
}

/** Returns how a machine ended. One that had a notice lost no work. */
function endOf(timeline: MachineTimeline): Shown {
  if (!timeline.lost) return "gone";
  return timeline.spans.some((span) => span.state === "notice") ? "evicted" : "dead";
}
