import { SegmentedControl, Select, Skeleton } from "@mantine/core";
import { Fragment, useCallback, useState } from "react";
import { Link, useSearchParams } from "react-router";
import { useSeveral } from "../api/jobs";
import type { Job, MetricPoint } from "../api/types";
import { Chart } from "../charts/Chart";
import type { Ink } from "../charts/ink";
import { type Curve, lines, timeAxis } from "../charts/options";
import { EmptyState } from "../components/EmptyState";
import { ErrorState } from "../components/ErrorState";
import { PageHead } from "../components/PageHead";
import { Panel } from "../components/Panel";
import { COLORS, differences, finals, jobsIn, type Row } from "../lib/comparison";
import { type Against, AXES, curve, evaluated, spread } from "../lib/curves";
import { compact, DASH, duration, metric, short, shortPercent, usd } from "../lib/format";
import { useNow } from "../lib/useNow";
import classes from "./ComparePage.module.css";

/** A job with its data, and the color of its curves. */
type Compared = {
  job: Job;
  metrics: MetricPoint[];
  spent: number | undefined;
  color: Curve["color"];
};

export default function ComparePage() {
  const [search] = useSearchParams();
  const ids = jobsIn(search);
  const { views, metrics, costs } = useSeveral(ids);
  const failed = views.find((each) => each.isError && !each.data);
  const compared = views.flatMap(({ data }, index): Compared[] =>
    data
      ? [
          {
            job: data,
            metrics: metrics[index]?.data ?? [],
            spent: costs[index]?.data?.spent_usd,
            color: COLORS[index] ?? "accent",
          },
        ]
      : [],
  );
  return (
    <div className="stack">
      <PageHead title="Compare jobs" />
      {ids.length < 2 && (
        <Panel title="Jobs">
          <EmptyState title="No jobs to compare">
            Tick two or more jobs in the <Link to="/">list of jobs</Link>.
          </EmptyState>
        </Panel>
      )}
      {failed && <ErrorState error={failed.error} onRetry={() => failed.refetch()} />}
      {ids.length > 1 && !failed && compared.length < ids.length && (
        <Skeleton height={320} radius="md" />
      )}
      {ids.length > 1 && compared.length === ids.length && (
        <>
          <ComparedCurves compared={compared} />
          <ComparedTable compared={compared} />
        </>
      )}
    </div>
  );
}

function ComparedCurves({ compared }: { compared: Compared[] }) {
  const [against, setAgainst] = useState<Against>("samples");
  const names = finals(compared.map(({ job }) => job)).map(({ name }) => name);
  const [chosen, choose] = useState<string | null>(null);
  const ranking = compared[0]?.job.best?.metric;
  const judged = chosen ?? (ranking && names.includes(ranking) ? ranking : names[0]);
  const curves = (points: (each: Compared, start: number) => Curve["points"], marked: boolean) =>
    compared.map((each) => ({
      name: each.job.id,
      color: each.color,
      marked,
      points: points(each, each.job.started_at ?? each.job.created_at),
    }));
  const loss = curves(
    ({ metrics }, start) => curve(metrics, against, start, (each) => each.loss),
    false,
  );
  const quality = judged
    ? curves(
        ({ job, metrics }, start) => evaluated(job.evaluations, judged, metrics, against, start),
        true,
      )
    : [];
  const most = Math.max(
    0,
    ...[...loss, ...quality].flatMap(({ points }) => points.map(([x]) => x)),
  );
  return (
    <Panel
      title="Training"
      tools={
        <>
          {names.length > 1 && (
            <Select
              size="xs"
              aria-label="Metric"
              data={names}
              value={judged ?? null}
              allowDeselect={false}
              onChange={choose}
            />
          )}
          <SegmentedControl
            size="xs"
            aria-label="Horizontal axis"
            data={AXES.map(({ value, label }) => ({ value, label }))}
            value={against}
            onChange={(value) => setAgainst(value as Against)}
          />
        </>
      }
    >
      <Overlay name="Training loss" of="loss" against={against} most={most} curves={loss} />
      {judged && (
        <Overlay
          name={`Validation ${judged}`}
          of={judged}
          against={against}
          most={most}
          curves={quality}
        />
      )}
    </Panel>
  );
}

function Overlay({
  name,
  of,
  against,
  most,
  curves,
}: {
  name: string;
  of: string;
  against: Against;
  /** End of the horizontal axis, which all charts share. */
  most: number;
  curves: Curve[];
}) {
  const format = AXES.find((each) => each.value === against)?.format ?? duration;
  const log = spread(curves.flatMap(({ points }) => points));
  const describe = useCallback(
    (ink: Ink) => {
      const x = against === "time" ? timeAxis(most) : { format, min: 0, max: most };
      const label = of === "accuracy" ? shortPercent : short;
      return lines(ink, x, { format: label, text: (value) => metric(of, value), log }, curves);
    },
    [against, format, of, most, curves, log],
  );
  const drawn = curves.filter(({ points }) => points.length > 0);
  return (
    <figure className={classes.figure}>
      <figcaption>
        {name}
        {log && ", log scale"}
      </figcaption>
      {drawn.length === 0 ? (
        <p className={classes.none}>No values yet.</p>
      ) : (
        <Chart label={`${name} of ${drawn.length} jobs`} describe={describe} />
      )}
    </figure>
  );
}

function ComparedTable({ compared }: { compared: Compared[] }) {
  const jobs = compared.map(({ job }) => job);
  const now = useNow(jobs.some((job) => !job.ended_at));
  const took = ({ started_at, ended_at }: Job) =>
    started_at ? (ended_at ?? now) - started_at : null;
  const results: Row<string>[] = [
    { name: "State", values: jobs.map((job) => job.state) },
    {
      name: "Best",
      values: jobs.map(({ best }) =>
        best ? `${best.metric} ${metric(best.metric, best.value)}` : null,
      ),
    },
    ...finals(jobs).map(({ name, values }) => ({
      name: `Last ${name}`,
      values: values.map((value) => metric(name, value)),
    })),
    { name: "Samples", values: jobs.map((job) => compact(job.progress.samples_applied)) },
    { name: "Time", values: jobs.map((job) => duration(took(job))) },
    { name: "Cost", values: compared.map(({ spent }) => usd(spent)) },
  ];
  const settings = differences(jobs);
  return (
    <Panel title="Results and settings" flush>
      {/* biome-ignore lint/a11y/noNoninteractiveTabindex: a scrollable area must be reachable by keyboard */}
      <section className={classes.scroll} tabIndex={0} aria-label="Comparison">
        <table className={classes.table}>
          <thead>
            <tr>
              <td />
              {compared.map(({ job, color }) => (
                <th key={job.id} scope="col">
                  <span className={classes.swatch} style={{ background: color }} />
                  <Link to={`/jobs/${job.id}`} className={classes.job} title={job.id}>
                    {job.id}
                  </Link>
                </th>
              ))}
            </tr>
          </thead>
          <Rows rows={results} jobs={jobs} />
          <Rows rows={settings} jobs={jobs} setting />
        </table>
      </section>
      {settings.length === 0 && <p className={classes.same}>All settings are the same.</p>}
    </Panel>
  );
}

/** The name of a setting, which may be broken after each of its words. */
const broken = (name: string) =>
  [...name.matchAll(/[^._]+[._]*/g)].map(({ 0: word, index: start }) => (
    <Fragment key={start}>
      {word}
      <wbr />
    </Fragment>
  ));

function Rows({ rows, jobs, setting }: { rows: Row<string>[]; jobs: Job[]; setting?: boolean }) {
  return (
    <tbody>
      {rows.map(({ name, values }) => (
        <tr key={name}>
          <th scope="row">{setting ? <code>{broken(name)}</code> : name}</th>
          {jobs.map((job, index) => (
            <td key={job.id}>{values[index] ?? DASH}</td>
          ))}
        </tr>
      ))}
    </tbody>
  );
}
