import { useElementSize } from "@mantine/hooks";
import type { ReactNode } from "react";
import {
  amountTicks,
  type Domain,
  fractionOf,
  labelled,
  placed,
  timeTicks,
} from "../../../lib/axis";
import { lookOf } from "../../../lib/states";
import { usePointer, usePointerEvents, useSelection } from "./pointer";
import classes from "./Track.module.css";

/** Pixels between two labels of the axis. */
const TICK_PIXELS = 100;

/** Position of a lost machine on the horizontal axis. */
export type Mark = { x: number; machine: string; state: "evicted" | "dead" };

/** Drawing along the horizontal axis that all tracks share, with its losses and the crosshair. */
export function Track({
  domain,
  marks = [],
  children,
}: {
  domain: Domain;
  marks?: Mark[];
  children: ReactNode;
}) {
  return (
    <div className={classes.track} data-zooms {...usePointerEvents()}>
      {children}
      {marks
        .filter(({ x }) => x >= domain.from && x <= domain.to)
        .map(({ x, machine, state }) => {
          const { word, tone } = lookOf(state);
          return (
            <span
              key={machine}
              className={classes.mark}
              style={{ left: percentOf(fractionOf(domain, x)) }}
              title={`${machine}: ${word}`}
              data-tone={tone}
              data-loss={machine}
            />
          );
        })}
      <Selection />
      <Crosshair />
    </div>
  );
}

/** Part of the axis that the pointer selects, to look at it closely. */
function Selection() {
  const selection = useSelection();
  if (!selection) return null;
  const [left, right] = [Math.min(...selection), Math.max(...selection)];
  const style = { left: percentOf(left), width: percentOf(right - left) };
  return <span className={classes.selection} style={style} aria-hidden />;
}

function Crosshair() {
  const position = usePointer();
  if (position === null) return null;
  return <span className={classes.crosshair} style={{ left: percentOf(position) }} aria-hidden />;
}

/** Labels of the horizontal axis, and the value under the crosshair. */
export function Scale({
  domain,
  kind,
  format,
}: {
  domain: Domain;
  kind: "time" | "amount";
  format: (value: number) => string;
}) {
  const { ref, width } = useElementSize();
  const number = Math.max(2, Math.floor(width / TICK_PIXELS));
  const ticks = kind === "time" ? timeTicks(domain, number) : amountTicks(domain, number);
  return (
    <div className={classes.row} aria-hidden>
      <div className={classes.scale} ref={ref}>
        {placed(labelled(ticks, format), domain, width).map(({ label, place, before }) => (
          <span
            key={label}
            className={classes.tick}
            style={{ left: percentOf(place) }}
            data-before={before || undefined}
          >
            {label}
          </span>
        ))}
        <Here domain={domain} format={format} />
      </div>
    </div>
  );
}

function Here({ domain, format }: { domain: Domain; format: (value: number) => string }) {
  const position = usePointer();
  if (position === null) return null;
  // On the side that has room.
  const style = position < 0.5 ? { left: percentOf(position) } : { right: percentOf(1 - position) };
  return (
    <b className={classes.here} style={style}>
      {format(domain.from + position * (domain.to - domain.from))}
    </b>
  );
}

function percentOf(fraction: number): string {
  return `${100 * fraction}%`;
}
