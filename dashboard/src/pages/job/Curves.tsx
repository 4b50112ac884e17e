import { Button, SegmentedControl, Slider } from "@mantine/core";
import { IconZoomReset } from "@tabler/icons-react";
import { useCallback, useMemo, useState } from "react";
import type { MetricPoint } from "../../api/types";
import { Chart } from "../../charts/Chart";
import type { Ink } from "../../charts/ink";
import { GUTTER, type Point, track } from "../../charts/options";
import { LOADING, Panel } from "../../components/Panel";
import { type Domain, valueAt } from "../../lib/axis";
import {
  type Against,
  AXES,
  type NamedCurve,
  positionOf,
  smoothed,
  spread,
  within,
} from "../../lib/curves";
import { duration, metric, short, shortPercent } from "../../lib/format";
import type { Loss } from "../../lib/timeline";
import classes from "./Curves.module.css";
import { usePointer } from "./tracks/pointer";
import { type Mark, Scale, Track } from "./tracks/Track";
import tracks from "./tracks/Track.module.css";

/** Curves that are shown at first; jobs can have many metrics. */
const FIRST = 5;
/** Heights of a chart: of few, and of more. */
const HIGH = 170;
const LOW = 120;
const MANY = 3;
/** Curves with fewer points mark each of them. */
const FEW_POINTS = 60;
/** Largest weight of earlier values. */
const MAX_SMOOTHING = 0.99;

/** The training loss and all metrics. Against time, they share the axis of the machines. */
export function Curves({
  curves,
  metrics,
  start,
  against,
  onAgainst,
  domain,
  onReset,
  losses,
  loading,
}: {
  curves: NamedCurve[];
  metrics: MetricPoint[];
  /** Time of the axis' 0, in Unix seconds. */
  start: number;
  against: Against;
  onAgainst: (against: Against) => void;
  /** Shown part of the axis. */
  domain: Domain;
  /** Shows the whole axis again; undefined if it is shown. */
  onReset: (() => void) | undefined;
  losses: Loss[];
  loading: boolean;
}) {
  const [smoothing, setSmoothing] = useState(0);
  const [all, setAll] = useState(false);
  const marks = losses.flatMap(({ at, machine, state }): Mark[] => {
    const x = positionOf(metrics, against, start, at);
    return x === null ? [] : [{ x, machine, state }];
  });
  const format = AXES.find((each) => each.value === against)?.format ?? duration;
  const drawn = curves.filter(({ points }) => points.length > 0);
  const shown = all ? drawn : drawn.slice(0, FIRST);
  return (
    <Panel
      title="Training"
      note={drawn.length ? "drag over a chart to zoom" : undefined}
      empty={drawn.length ? undefined : loading ? LOADING : noData(against)}
      tools={
        <>
          {onReset && (
            <Button
              size="compact-xs"
              variant="light"
              leftSection={<IconZoomReset size={14} />}
              onClick={onReset}
            >
              Reset zoom
            </Button>
          )}
          <Smoothing value={smoothing} onChange={setSmoothing} />
          <SegmentedControl
            size="xs"
            aria-label="Horizontal axis"
            data={AXES.map(({ value, label }) => ({ value, label }))}
            value={against}
            onChange={(value) => onAgainst(value as Against)}
          />
        </>
      }
    >
      {shown.map((each) => (
        <Curve
          key={each.title}
          curve={each}
          smoothing={smoothing}
          height={shown.length > MANY ? LOW : HIGH}
          domain={domain}
          marks={marks}
          format={format}
        />
      ))}
      <Scale domain={domain} format={format} kind={against === "time" ? "time" : "amount"} />
      {drawn.length > FIRST && (
        <Button variant="subtle" size="xs" mt="xs" onClick={() => setAll(!all)}>
          {all ? "Show fewer charts" : `Show all ${drawn.length} charts`}
        </Button>
      )}
    </Panel>
  );
}

function Smoothing({ value, onChange }: { value: number; onChange: (value: number) => void }) {
  return (
    <div className={classes.smoothing}>
      <span>Smoothing {value ? value.toFixed(2) : "off"}</span>
      <Slider
        size="xs"
        w={90}
        min={0}
        max={MAX_SMOOTHING}
        step={0.01}
        label={null}
        thumbLabel="Smoothing"
        value={value}
        onChange={onChange}
      />
    </div>
  );
}

function Curve({
  curve: { name, title, color, points },
  smoothing,
  height,
  domain,
  marks,
  format,
}: {
  curve: NamedCurve;
  smoothing: number;
  height: number;
  domain: Domain;
  marks: Mark[];
  format: (x: number) => string;
}) {
  // Each evaluation is an event of its own.
  const few = color !== "accent";
  const log = useMemo(() => spread(points), [points]);
  const text = useCallback((value: number) => metric(name, value), [name]);
  const describe = useCallback(
    (ink: Ink) => {
      const visible = within(points, domain);
      const raw = {
        name: title,
        points: visible,
        color,
        marked: few && visible.length < FEW_POINTS,
      };
      const axis = { format: name === "accuracy" ? shortPercent : short, log };
      if (!smoothing) return track(ink, domain, axis, [raw]);
      const line = { name: "smoothed", points: within(smoothed(points, smoothing), domain), color };
      return track(ink, domain, axis, [{ ...raw, marked: false, faint: true }, line]);
    },
    [domain, log, name, title, points, color, few, smoothing],
  );
  return (
    <figure className={`${tracks.row} ${classes.figure}`}>
      <figcaption>
        <span className={classes.name} title={title}>
          {title}
        </span>
        <Reading points={points} domain={domain} format={format} text={text} />
        {log && <span className={classes.log}>log scale</span>}
      </figcaption>
      <Track domain={domain} marks={marks}>
        <div style={{ marginLeft: -GUTTER }}>
          <Chart height={height} label={labelOf(title, points, text)} describe={describe} />
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

function noData(against: Against): string {
  return against === "money"
    ? "The cost of the machines is not known yet."
    : "Curves appear with the first update and the first evaluation.";
}

function labelOf(title: string, points: Point[], text: (value: number) => string): string {
  const [first, last] = [points[0], points.at(-1)];
  return first && last ? `${title}: from ${text(first[1])} to ${text(last[1])}` : title;
}
