import { useElementSize } from "@mantine/hooks";
import type { ReactNode } from "react";
import { amountTicks, type Domain, fractionOf, timeTicks } from "../../../lib/axis";
import { lookOf } from "../../../lib/states";
import { usePointer, usePointerEvents } from "./pointer";
import classes from "./Track.module.css";

/** Pixels between two labels of the axis. */
const TICK_PIXELS = 100;
/** Fraction of the axis after which a label has no room. */
const LAST_TICK = 0.94;

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
    <div className={classes.track} {...usePointerEvents()}>
      {children}
      {marks.map(({ x, machine, state }) => {
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
      <Crosshair />
    </div>
  );
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
  const length = domain.to - domain.from;
  const number = Math.max(2, Math.floor(width / TICK_PIXELS));
  const ticks = kind === "time" ? timeTicks(length, number) : amountTicks(length, number);
  return (
    <div className={classes.row} aria-hidden>
      <div className={classes.scale} ref={ref}>
        {ticks
          .filter((at) => at === 0 || at / length < LAST_TICK)
          .map((at) => (
            <span key={at} className={classes.tick} style={{ left: percentOf(at / length) }}>
              {format(at)}
            </span>
          ))}
        <Here length={length} format={format} />
      </div>
    </div>
  );
}

function Here({ length, format }: { length: number; format: (value: number) => string }) {
  const position = usePointer();
  if (position === null) return null;
  // On the side that has room.
  const style = position < 0.5 ? { left: percentOf(position) } : { right: percentOf(1 - position) };
  return (
    <b className={classes.here} style={style}>
      {format(position * length)}
    </b>
  );
}

function percentOf(fraction: number): string {
  return `${100 * fraction}%`;
}
