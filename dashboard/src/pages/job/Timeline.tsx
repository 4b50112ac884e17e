import { Menu } from "@mantine/core";
import { useElementSize } from "@mantine/hooks";
import { notifications } from "@mantine/notifications";
import { IconBell, IconBolt, IconDots } from "@tabler/icons-react";
import { memo, useEffect, useMemo, useRef, useState } from "react";
import { flushSync } from "react-dom";
import { explained } from "../../api/client";
import { useEvict } from "../../api/jobs";
import type { MachineTimeline } from "../../api/types";
import type { Domain } from "../../lib/axis";
import { clock, duration, usd } from "../../lib/format";
import { lookOf } from "../../lib/states";
import {
  BAR_PAD,
  type Bar,
  LANE,
  type Lane,
  type Layout,
  layout,
  type Shown,
  stateOf,
} from "../../lib/timeline";
import classes from "./Timeline.module.css";
import { Scale, Track } from "./tracks/Track";

const STATES: Shown[] = ["booting", "running", "notice", "draining", "evicted", "dead", "gone"];
const ENDED: Shown[] = ["evicted", "dead", "gone"];
/** Padding on both sides of a bulk loss. */
const BULK_PAD = 5;

/** Timeline with one lane per machine; arrows lead to replacements. */
export function Timeline({
  machines,
  now,
  times,
  start,
  mayEvict,
}: {
  machines: MachineTimeline[];
  now: number;
  /** Shown range in Unix seconds. */
  times: Domain;
  /** Time at which the axis has its 0. */
  start: number;
  mayEvict: boolean;
}) {
  const { ref, width } = useElementSize();
  const timeline = useMemo(
    () => layout(machines, Math.max(width, 50), now, times),
    [machines, width, now, times],
  );
  return (
    <>
      {/* biome-ignore lint/a11y/noNoninteractiveTabindex: a scrollable area must be reachable by keyboard */}
      <section className={classes.scroll} tabIndex={0} aria-label="Timeline of machines">
        <div className={classes.grid}>
          <ul className={classes.names}>
            {timeline.lanes.map((lane) => (
              <Name key={lane.timeline.machine} timeline={lane.timeline} mayEvict={mayEvict} />
            ))}
          </ul>
          <Track domain={times}>
            <div ref={ref} style={{ height: timeline.height }}>
              {width > 0 && <Drawing timeline={timeline} width={width} />}
            </div>
          </Track>
        </div>
      </section>
      <Scale
        domain={{ from: times.from - start, to: times.to - start }}
        format={duration}
        kind="time"
      />
      <ul className={classes.legend}>
        {STATES.map((state) => (
          <li key={state} data-tone={lookOf(state).tone}>
            {wordOf(state)}
          </li>
        ))}
      </ul>
    </>
  );
}

/** Memoized, so that only changed machines are rendered again. */
const Name = memo(function Name({
  timeline,
  mayEvict,
}: {
  timeline: MachineTimeline;
  mayEvict: boolean;
}) {
  const state = stateOf(timeline);
  const alive = state === "running" || state === "booting";
  return (
    <li
      className={classes.name}
      style={{ height: LANE }}
      data-state={state}
      data-tone={lookOf(state).tone}
      data-machine={timeline.machine}
    >
      <span className={classes.texts} title={summaryOf(timeline)}>
        <span className={classes.first}>
          <span className={classes.label}>{short(timeline.machine)}</span>
          <span className={classes.word}>{state === "given" ? "given away" : wordOf(state)}</span>
        </span>
        <span className={classes.origin}>
          {state === "given" ? `given to ${timeline.given_to}` : originOf(timeline)}
        </span>
      </span>
      {alive && mayEvict && <EvictButton machine={timeline.machine} />}
    </li>
  );
});

function wordOf(state: Shown): string {
  return state === "running" ? "training" : lookOf(state).word;
}

/** Returns the type, the zone, and the price. */
function originOf({ machine_type, zone, spot, price_per_hour }: MachineTimeline): string {
  const price = price_per_hour ? `${usd(price_per_hour)}/h` : null;
  return [machine_type, zone, price, spot ? null : "on demand"].filter(Boolean).join(" · ");
}

/** Shortens a name to its end, which distinguishes it from others. */
function short(machine: string): string {
  return machine.length > 14 ? `…${machine.slice(-12)}` : machine;
}

function summaryOf(timeline: MachineTimeline): string {
  const kind = timeline.spot ? "spot" : "on demand";
  const reason = timeline.given_to ? `given to ${timeline.given_to}` : timeline.reason;
  const why = reason ? `; ${reason}` : "";
  return `${timeline.machine}: pool ${timeline.pool}, ${kind}, ${originOf(timeline)}${why}`;
}

/** Input device that approached a button. */
type Approach = "mouse" | "keyboard" | "click";

/** Button for a machine; its menu is rendered only when the pointer or focus approaches. */
function EvictButton({ machine }: { machine: string }) {
  const [approach, setApproach] = useState<Approach | null>(null);
  if (approach) return <EvictMenu machine={machine} approach={approach} />;
  return (
    <button
      type="button"
      className={classes.take}
      aria-label={`Evict ${machine}`}
      aria-haspopup="menu"
      // At once: a press on a button that is replaced before the release is no click.
      onPointerEnter={(event) =>
        event.pointerType === "mouse" && flushSync(() => setApproach("mouse"))
      }
      onFocus={(event) => event.target.matches(":focus-visible") && setApproach("keyboard")}
      onClick={() => setApproach("click")}
    >
      <IconDots size={15} />
    </button>
  );
}

function EvictMenu({ machine, approach }: { machine: string; approach: Approach }) {
  const target = useRef<HTMLButtonElement>(null);
  useEffect(() => {
    // The menu replaces the focused button.
    if (approach !== "mouse") target.current?.focus();
  }, [approach]);
  const evict = useEvict();
  const send = (kill: boolean) =>
    evict.mutate(
      { machine, kill },
      {
        onSuccess: () =>
          notifications.show({ message: `${machine} is ${kill ? "killed" : "evicted"}` }),
        onError: (error) => {
          notifications.show({ color: "red", message: explained(error) });
        },
      },
    );
  return (
    <Menu position="bottom-start" width={210} defaultOpened={approach === "click"}>
      <Menu.Target>
        <button type="button" ref={target} className={classes.take} aria-label={`Evict ${machine}`}>
          <IconDots size={15} />
        </button>
      </Menu.Target>
      <Menu.Dropdown>
        <Menu.Item leftSection={<IconBell size={15} />} onClick={() => send(false)}>
          Evict with notice
        </Menu.Item>
        <Menu.Item color="red" leftSection={<IconBolt size={15} />} onClick={() => send(true)}>
          Kill without notice
        </Menu.Item>
      </Menu.Dropdown>
    </Menu>
  );
}

function Drawing({ timeline, width }: { timeline: Layout; width: number }) {
  return (
    <svg
      width={width}
      height={timeline.height}
      className={classes.drawing}
      role="img"
      aria-label={`${timeline.lanes.length} machines`}
    >
      <defs>
        <marker
          id="arrowhead"
          viewBox="0 0 6 6"
          refX="5"
          refY="3"
          markerWidth="6"
          markerHeight="6"
          orient="auto"
        >
          <path d="M0 0L6 3L0 6z" className={classes.head} />
        </marker>
      </defs>
      {timeline.bulks.map((bulk) => (
        <rect
          key={bulk.at}
          x={bulk.x - BULK_PAD}
          y={0}
          width={bulk.width + 2 * BULK_PAD}
          height={timeline.height}
          className={classes.bulk}
          data-bulk={bulk.machines.length}
        >
          <title>{`${bulk.machines.length} machines lost at ${clock(bulk.at)}`}</title>
        </rect>
      ))}
      {timeline.lanes.map((lane) => (
        <g key={lane.timeline.machine} data-lane={lane.timeline.machine}>
          <line
            x1={0}
            x2={width}
            y1={lane.y + LANE - 0.5}
            y2={lane.y + LANE - 0.5}
            className={classes.rule}
          />
          {lane.bars.map((bar) => (
            <Block key={`${bar.state}${bar.from}`} lane={lane} bar={bar} />
          ))}
        </g>
      ))}
      {timeline.arrows.map(({ from, to, x1, y1, x2, y2 }) => (
        <path
          key={`${from} ${to}`}
          data-arrow={to}
          d={`M${x1 + 2} ${y1}L${x2 + 3} ${y2 - 1}`}
          className={classes.arrow}
          markerEnd="url(#arrowhead)"
        />
      ))}
    </svg>
  );
}

function Block({ lane, bar }: { lane: Lane; bar: Bar }) {
  const long = ENDED.includes(bar.state) ? "" : `, ${duration(bar.to - bar.from)}`;
  return (
    <rect
      x={bar.x}
      y={lane.y + BAR_PAD}
      width={bar.width}
      height={LANE - 2 * BAR_PAD}
      rx={2}
      className={classes.bar}
      data-state={bar.state}
      data-tone={lookOf(bar.state).tone}
    >
      <title>{`${wordOf(bar.state)} at ${clock(bar.from)}${long}`}</title>
    </rect>
  );
}
