import { useCallback, useMemo } from "react";
import { isOver, useMetrics } from "../../api/jobs";
import type { Job, MetricPoint } from "../../api/types";
import { Chart } from "../../charts/Chart";
import type { Ink } from "../../charts/ink";
import { lines, timeAxis } from "../../charts/options";
import { LOADING, Panel } from "../../components/Panel";
import { curve } from "../../lib/curves";
import { decimal, short } from "../../lib/format";

const NONE: MetricPoint[] = [];

/** Rate of applied updates. */
export function Rates({ job }: { job: Job }) {
  const query = useMetrics(job.id);
  const metrics = query.data ?? NONE;
  const start = job.created_at;
  const rate = useMemo(
    () => curve(metrics, "time", start, (each) => each.updates_per_second),
    [metrics, start],
  );
  const describe = useCallback(
    (ink: Ink) =>
      lines(
        ink,
        timeAxis(Math.max(10, rate.at(-1)?.[0] ?? 0)),
        { format: short, text: (value) => decimal(value, 1), min: 0 },
        [{ name: "Updates per second", points: rate, color: "accent", fill: true }],
      ),
    [rate],
  );
  return (
    <Panel
      title="Updates per second"
      note={job.ended_at ? undefined : `${decimal(rate.at(-1)?.[1], 1)} now`}
      empty={
        rate.length
          ? undefined
          : query.isPending
            ? LOADING
            : isOver(job)
              ? "No updates."
              : "No updates yet."
      }
    >
      <Chart height={180} label={`Updates per second, ${rate.length} points`} describe={describe} />
    </Panel>
  );
}
