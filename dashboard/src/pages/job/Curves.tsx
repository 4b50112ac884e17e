import { SegmentedControl } from "@mantine/core";
import { useCallback, useMemo } from "react";
import { useMetrics } from "../../api/jobs";
import type { Job, MetricPoint } from "../../api/types";
import { Chart } from "../../charts/Chart";
import type { Ink } from "../../charts/ink";
import { GUTTER, type Point, track } from "../../charts/options";
import { Panel } from "../../components/Panel";
import { type Domain, valueAt } from "../../lib/axis";
import { type Against, AXES, curve, evaluated, positionOf } from "../../lib/curves";
import { duration, percent } from "../../lib/format";
import type { Loss } from "../../lib/timeline";
import classes from "./Curves.module.css";
import { usePointer } from "./tracks/pointer";
import { type Mark, Scale, Track } from "./tracks/Track";
import tracks from "./tracks/Track.module.css";

/** Ratio of the largest to the smallest value from which an axis is logarithmic. */
const LOG_RATIO = 20;
const NONE: MetricPoint[] = [];

/** Training loss and validation accuracy. Against time, they share the axis of the machines. */
export function Curves({
  job,
  against,
  onAgainst,
  times,
  losses,
}: {
  job: Job;
  against: Against;
  onAgainst: (against: Against) => void;
  /** Range of the time axis in Unix seconds. */
  times: Domain;
  losses: Loss[];
}) {
  const metrics = useMetrics(job.id).data ?? NONE;
  const start = times.from;
  const { evaluations } = job;
  const loss = useMemo(
    () => curve(metrics, against, start, (each) => each.loss),
    [metrics, against, start],
  );
  const accuracy = useMemo(
    () => evaluated(evaluations, "accuracy", metrics, against, start),
    [evaluations, metrics, against, start],
  );
  const most =
    against === "time" ? times.to - start : Math.max(0, ...[...loss, ...accuracy].map(([x]) => x));
  const domain = useMemo(() => ({ from: 0, to: most }), [most]);
  const marks = losses.flatMap(({ at, machine, state }): Mark[] => {
    const x = positionOf(metrics, against, start, at);
    return x === null ? [] : [{ x, machine, state }];
  });
  const format = AXES.find((each) => each.value === against)?.format ?? duration;
  const shared = { domain, marks, format };
  const empty = loss.length + accuracy.length === 0;
  return (
    <Panel
      title="Training"
      empty={empty ? noData(against) : undefined}
      tools={
        <SegmentedControl
          size="xs"
          aria-label="Horizontal axis"
          data={AXES.map(({ value, label }) => ({ value, label }))}
          value={against}
          onChange={(value) => onAgainst(value as Against)}
        />
      }
    >
      <Curve name="Training loss" color="accent" points={loss} text={decimalOf} {...shared} />
      <Curve
        name="Validation accuracy"
        color="good"
        points={accuracy}
        text={percentOf}
        marked={accuracy.length < 60}
        {...shared}
      />
      <Scale domain={domain} format={format} kind={against === "time" ? "time" : "amount"} />
    </Panel>
  );
}

function Curve({
  name,
  color,
  points,
  domain,
  marks,
  format,
  text,
  marked,
}: {
  name: string;
  color: keyof Ink;
  points: Point[];
  domain: Domain;
  marks: Mark[];
  format: (x: number) => string;
  text: (y: number) => string;
  marked?: boolean;
}) {
  const log = spread(points);
  const describe = useCallback(
    (ink: Ink) => track(ink, domain, { format: text, log }, { name, points, color, marked }),
    [domain, text, log, name, points, color, marked],
  );
  if (points.length === 0) return null;
  return (
    <figure className={`${tracks.row} ${classes.figure}`}>
      <figcaption>
        {name}
        <Reading points={points} domain={domain} format={format} text={text} />
        {log && <span className={classes.log}>logarithmic scale</span>}
      </figcaption>
      <Track domain={domain} marks={marks}>
        <div style={{ marginLeft: -GUTTER }}>
          <Chart height={170} label={labelOf(name, points, text)} describe={describe} />
        </div>
      </Track>
    </figure>
  );
}

/** Value under the crosshair, or the last one. */
function Reading({
  points,
  domain,
  format,
  text,
}: {
  points: Point[];
  domain: Domain;
  format: (x: number) => string;
  text: (y: number) => string;
}) {
  const position = usePointer();
  const x = position === null ? null : domain.from + position * (domain.to - domain.from);
  const value = x === null ? points.at(-1)?.[1] : valueAt(points, x);
  return (
    <>
      <b>{value === undefined || value === null ? "" : text(value)}</b>
      {x !== null && <span>at {format(x)}</span>}
    </>
  );
}

/** Returns true if the values span orders of magnitude. */
function spread(points: Point[]): boolean {
  const values = points.map(([, y]) => y);
  const least = Math.min(...values);
  return least > 0 && Math.max(...values) / least > LOG_RATIO;
}

function noData(against: Against): string {
  return against === "money"
    ? "The cost of the machines is not known yet."
    : "Curves appear with the first update and the first evaluation.";
}

function labelOf(name: string, points: Point[], text: (value: number) => string): string {
  const [first, last] = [points[0], points.at(-1)];
  return first && last ? `${name}: from ${text(first[1])} to ${text(last[1])}` : name;
}

function decimalOf(value: number): string {
  return String(Number(value.toPrecision(3)));
}

function percentOf(value: number): string {
  return percent(value);
}
