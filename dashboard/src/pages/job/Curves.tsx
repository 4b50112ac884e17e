import { SegmentedControl } from "@mantine/core";
import { useCallback, useMemo, useState } from "react";
import { useMetrics } from "../../api/jobs";
import type { Job, MetricPoint } from "../../api/types";
import { Chart } from "../../charts/Chart";
import type { Ink } from "../../charts/ink";
import { lines, type Point } from "../../charts/options";
import { EmptyState } from "../../components/EmptyState";
import { Panel } from "../../components/Panel";
import { type Against, curve, positionOf } from "../../lib/curves";
import { compact, decimal, duration, percent, usd } from "../../lib/format";
import classes from "./Curves.module.css";

const AXES: { value: Against; label: string; format: (value: number) => string }[] = [
  { value: "time", label: "Time", format: duration },
  { value: "samples", label: "Samples", format: compact },
  { value: "money", label: "Cost", format: usd },
];
/** Ratio of the largest to the smallest value from which an axis is logarithmic. */
const LOG_RATIO = 20;
const NONE: MetricPoint[] = [];

/** Training loss and validation accuracy. */
export function Curves({ job }: { job: Job }) {
  const [against, setAgainst] = useState<Against>("time");
  const metrics = useMetrics(job.id).data ?? NONE;
  const start = job.started_at ?? job.created_at;
  const x = AXES.find((each) => each.value === against)?.format ?? duration;
  const { evaluations } = job;
  const loss = useMemo(
    () => curve(metrics, against, start, (each) => each.loss),
    [metrics, against, start],
  );
  const accuracy = useMemo(
    () => evaluated(evaluations, metrics, against, start),
    [evaluations, metrics, against, start],
  );
  const describeLoss = useCallback(
    (ink: Ink) =>
      lines(ink, { format: x }, { format: decimalOf, log: spread(loss) }, [
        { name: "Loss", points: loss, color: "accent" },
      ]),
    [x, loss],
  );
  const describeAccuracy = useCallback(
    (ink: Ink) =>
      lines(ink, { format: x }, { format: percentOf }, [
        { name: "Accuracy", points: accuracy, color: "good", marked: accuracy.length < 60 },
      ]),
    [x, accuracy],
  );
  return (
    <Panel
      title="Training"
      tools={
        <SegmentedControl
          size="xs"
          aria-label="Horizontal axis"
          data={AXES.map(({ value, label }) => ({ value, label }))}
          value={against}
          onChange={(value) => setAgainst(value as Against)}
        />
      }
    >
      <div className="two">
        <figure className={classes.figure}>
          <figcaption>
            Training loss <b>{decimal(loss.at(-1)?.[1], 3)}</b>
          </figcaption>
          {loss.length ? (
            <Chart label={labelOf("Training loss", loss, decimalOf)} describe={describeLoss} />
          ) : (
            <NoData against={against} first="The loss appears with the first update." />
          )}
        </figure>
        <figure className={classes.figure}>
          <figcaption>
            Validation accuracy <b>{percent(accuracy.at(-1)?.[1])}</b>
          </figcaption>
          {accuracy.length ? (
            <Chart
              label={labelOf("Validation accuracy", accuracy, percentOf)}
              describe={describeAccuracy}
            />
          ) : (
            <NoData against={against} first="The accuracy appears with the first evaluation." />
          )}
        </figure>
      </div>
    </Panel>
  );
}

function NoData({ against, first }: { against: Against; first: string }) {
  return (
    <EmptyState title="No data yet">
      {against === "money" ? "The cost of the machines is not known yet." : first}
    </EmptyState>
  );
}

function evaluated(
  evaluations: Job["evaluations"],
  metrics: MetricPoint[],
  against: Against,
  start: number,
): Point[] {
  return evaluations.flatMap((each) => {
    const y = each.metrics.accuracy;
    const { samples } = each;
    const known = against === "samples" && samples !== null && samples !== undefined;
    const x = known ? samples : positionOf(metrics, against, start, each.at);
    return y === null || y === undefined || x === null ? [] : [[x, y] as Point];
  });
}

function labelOf(name: string, points: Point[], text: (value: number) => string): string {
  const [first, last] = [points[0], points.at(-1)];
  return first && last ? `${name}: from ${text(first[1])} to ${text(last[1])}` : name;
}

function spread(points: Point[]): boolean {
  const values = points.map(([, y]) => y);
  const least = Math.min(...values);
  return least > 0 && Math.max(...values) / least > LOG_RATIO;
}

function decimalOf(value: number): string {
  return String(Number(value.toPrecision(3)));
}

function percentOf(value: number): string {
  return `${Number((100 * value).toFixed(1))}%`;
}
