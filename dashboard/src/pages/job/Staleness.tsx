import { SegmentedControl } from "@mantine/core";
import { useCallback, useMemo, useState } from "react";
import { isOver, useMetrics, useStaleness } from "../../api/jobs";
import type { Job, MetricPoint } from "../../api/types";
import { Chart } from "../../charts/Chart";
import type { Ink } from "../../charts/ink";
import { bars, lines, timeAxis } from "../../charts/options";
import { LOADING, Panel } from "../../components/Panel";
import { curve } from "../../lib/curves";
import { compact, decimal, short } from "../../lib/format";

/** The last bucket includes all higher values. */
const LAST_BUCKET = 32;
const NONE: MetricPoint[] = [];

/** Staleness of the applied updates. */
export function Staleness({ job }: { job: Job }) {
  const [shown, setShown] = useState("histogram");
  const query = useStaleness(job.id);
  const view = query.data;
  const note = view
    ? `model versions that an update missed: mean ${decimal(view.mean)}, max ${view.max}`
    : undefined;
  const empty = !view?.buckets.some((each) => each.updates > 0);
  return (
    <Panel
      title="Staleness"
      note={note}
      empty={
        empty
          ? query.isPending
            ? LOADING
            : isOver(job)
              ? "No updates."
              : "No updates yet."
          : undefined
      }
      tools={
        <SegmentedControl
          size="xs"
          aria-label="Chart type"
          data={[
            { value: "histogram", label: "Histogram" },
            { value: "mean", label: "Mean" },
          ]}
          value={shown}
          onChange={setShown}
        />
      }
    >
      {shown === "histogram" ? <Histogram buckets={view?.buckets ?? []} /> : <Mean job={job} />}
    </Panel>
  );
}

function Histogram({ buckets }: { buckets: { staleness: number; updates: number }[] }) {
  const describe = useCallback(
    (ink: Ink) =>
      bars(
        ink,
        buckets.map(({ staleness }) =>
          staleness >= LAST_BUCKET ? `${staleness}+` : String(staleness),
        ),
        buckets.map(({ updates }) => updates),
        { format: compact },
      ),
    [buckets],
  );
  return <Chart height={180} label="Updates by staleness" describe={describe} />;
}

function Mean({ job }: { job: Job }) {
  const metrics = useMetrics(job.id).data ?? NONE;
  const start = job.started_at ?? job.created_at;
  const mean = useMemo(
    () => curve(metrics, "time", start, (each) => each.staleness_mean),
    [metrics, start],
  );
  const describe = useCallback(
    (ink: Ink) =>
      lines(
        ink,
        timeAxis(mean.at(-1)?.[0] ?? 0),
        { format: short, text: (value) => decimal(value, 1), min: 0 },
        [{ name: "Mean staleness", points: mean, color: "accent" }],
      ),
    [mean],
  );
  return <Chart height={180} label="Mean staleness over time" describe={describe} />;
}
