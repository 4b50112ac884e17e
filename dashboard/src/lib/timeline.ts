import type { Machine, Span } from "../api/types";

export type Shown = Span["state"] | "gone";

export type Bar = { state: Shown; x: number; width: number; from: number; to: number };

export type Lane = { machine: Machine; y: number; bars: Bar[]; lostAt: number };

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

export const LANE = 26;
export const BAR_PAD = 6;
/** Minimum width in pixels, because a loss has no duration. */
const LEAST_WIDTH = 6;
/** Losses within this time are a bulk if they are this many, and this fraction of all machines. */
const BULK_SECONDS = 30;
const BULK_MACHINES = 3;
const BULK_FRACTION = 0.2;

/** Lays out the machines' states in pixels; open spans end at `now`. */
export function layout(machines: readonly Machine[], width: number, now: number): Layout {
  const starts = machines.flatMap((each) => each.spans.map((span) => span.from));
  const from = Math.min(now, ...starts);
  const to = Math.max(
    from + 1,
    ...machines.flatMap((each) => each.spans.map((span) => span.to ?? now)),
  );
  const x = (at: number) => ((at - from) / (to - from)) * width;
  const lanes = machines.map((machine, row) => lane(machine, row * LANE, x, width, now));
  const bulkLosses = bulks(machines, now).map(({ at, until, lost }) => ({
    at,
    machines: lost,
    x: Math.min(x(at), width - LEAST_WIDTH),
    width: Math.max(LEAST_WIDTH, x(until) - x(at)),
  }));
  const height = lanes.length * LANE;
  return { lanes, arrows: arrows(lanes), bulks: bulkLosses, height, from, to };
}

function lane(
  machine: Machine,
  y: number,
  x: (at: number) => number,
  width: number,
  now: number,
): Lane {
  const bars = machine.spans.map((span) => {
    const to = span.state === "dead" ? span.from : (span.to ?? now);
    const left = Math.min(x(span.from), width - LEAST_WIDTH);
    return {
      state: shown(machine, span),
      x: left,
      width: Math.max(LEAST_WIDTH, x(to) - left),
      from: span.from,
      to,
    };
  });
  // The replacement is ordered when the loss is known, which can be before the end.
  const loss = machine.spans.find((span) => span.state === "notice" || span.state === "dead");
  return { machine, y, bars, lostAt: x(loss?.from ?? now) };
}

/** Returns the bulk losses with their times and machines. */
export function bulks(
  machines: readonly Machine[],
  now: number,
): { at: number; until: number; lost: string[] }[] {
  const deaths = machines
    .flatMap((each) => {
      const at = lostAt(each);
      return at === null ? [] : [{ at, name: each.instance }];
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

function lostAt(machine: Machine): number | null {
  const dead = machine.lost ? machine.spans.find((span) => span.state === "dead") : undefined;
  return dead?.from ?? null;
}

function present(machines: readonly Machine[], at: number, now: number): number {
  return machines.filter(({ spans }) => {
    const last = spans.at(-1);
    const end = last?.state === "dead" ? last.from : (last?.to ?? now);
    return (spans[0]?.from ?? now) <= at && end >= at;
  }).length;
}

function arrows(lanes: Lane[]): Arrow[] {
  const byName = new Map(lanes.map((each) => [each.machine.instance, each]));
  return lanes.flatMap((lane) => {
    const next = lane.machine.replaced_by ? byName.get(lane.machine.replaced_by) : undefined;
    const first = next?.bars[0];
    if (!next || !first) return [];
    return [
      {
        from: lane.machine.instance,
        to: next.machine.instance,
        x1: lane.lostAt,
        y1: lane.y + LANE - BAR_PAD,
        x2: first.x,
        y2: next.y + BAR_PAD,
      },
    ];
  });
}

/** Returns about `number` round times for the axis, in seconds since the start. */
export function ticks(seconds: number, number: number): number[] {
  const steps = [
    1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400,
  ];
  const step = steps.find((each) => seconds / each <= number) ?? Math.ceil(seconds / number);
  const times: number[] = [];
  for (let at = 0; at <= seconds; at += step) times.push(at);
  return times;
}

/** Returns the state to show; a terminated machine that was not lost is "gone". */
export function stateOf(machine: Machine): Shown {
  const last = machine.spans.at(-1);
  if (!last || (last.to !== null && last.state !== "dead")) return "gone";
  return shown(machine, last);
}

function shown(machine: Machine, span: Span): Shown {
  return span.state === "dead" && !machine.lost ? "gone" : span.state;
}
