import { useComputedColorScheme } from "@mantine/core";
import { useEffect, useRef } from "react";
import { isOver, useSubtasks } from "../../api/jobs";
import type { Job, SubtaskMap } from "../../api/types";
import { readInk } from "../../charts/ink";
import { LOADING, Panel } from "../../components/Panel";
import { count } from "../../lib/format";
import { KINDS, type Kind } from "../../lib/subtasks";
import classes from "./Subtasks.module.css";

const GAP = 2;
const LARGEST = 34;
const SMALLEST = 3;
const HEIGHT = 150;

/** Map of the epoch's subtasks, one square each, or one for several if there are many. */
export function Subtasks({ job }: { job: Job }) {
  const query = useSubtasks(job.id);
  const view = query.data;
  return (
    <Panel
      title="Parts of the epoch"
      note={view?.states ? noteOf(view) : undefined}
      empty={view?.states ? undefined : query.isPending ? LOADING : unknown(job)}
    >
      {view?.states && (
        <>
          <Squares states={view.states} counts={view.counts} />
          <Legend counts={view.counts} />
        </>
      )}
    </Panel>
  );
}

function unknown(job: Job): string {
  return isOver(job)
    ? "The job ended before a worker had read the data set."
    : "Known when the first worker has read the data set.";
}

function noteOf(view: SubtaskMap): string {
  const note = `subtasks of epoch ${view.epoch}, ${count(view.total)} in total`;
  return view.per_letter > 1 ? `${note}, ${count(view.per_letter)} per square` : note;
}

type Counts = SubtaskMap["counts"];

function Squares({ states, counts }: { states: string; counts: Counts }) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const scheme = useComputedColorScheme("light");
  // biome-ignore lint/correctness/useExhaustiveDependencies: the colors change with the scheme
  useEffect(() => {
    const element = canvas.current;
    if (!element) return;
    const resize = new ResizeObserver(() => draw(element, states));
    resize.observe(element);
    return () => resize.disconnect();
  }, [states, scheme]);
  const label = KINDS.map(({ key, name }) => `${count(counts[key] ?? 0)} ${name}`).join(", ");
  return (
    <canvas ref={canvas} className={classes.map} role="img" aria-label={`Subtasks: ${label}`} />
  );
}

/** Returns the largest side at which all squares fit. */
export function sideOf(number: number, width: number, height: number): number {
  for (let side = LARGEST; side > SMALLEST; side -= 1) {
    const columns = Math.floor((width + GAP) / (side + GAP));
    if (Math.ceil(number / columns) * (side + GAP) <= height + GAP) return side;
  }
  return SMALLEST;
}

function draw(canvas: HTMLCanvasElement, states: string): void {
  const width = canvas.clientWidth;
  const context = canvas.getContext("2d");
  if (!context || width === 0) return;
  const side = sideOf(states.length, width, HEIGHT);
  const columns = Math.max(1, Math.floor((width + GAP) / (side + GAP)));
  const height = Math.ceil(states.length / columns) * (side + GAP);
  const scale = window.devicePixelRatio || 1;
  canvas.width = width * scale;
  canvas.height = height * scale;
  canvas.style.height = `${height}px`;
  context.scale(scale, scale);
  const colors = colorsOf();
  for (let index = 0; index < states.length; index += 1) {
    context.fillStyle = colors[states[index] as Kind] ?? colors.o;
    const [column, row] = [index % columns, Math.floor(index / columns)];
    context.beginPath();
    context.roundRect(column * (side + GAP), row * (side + GAP), side, side, side > 8 ? 3 : 1);
    context.fill();
  }
}

function colorsOf(): Record<Kind, string> {
  const ink = readInk();
  return { o: ink.line, l: ink.accent, p: "#5fb8c9", r: ink.warn, a: ink.good };
}

function Legend({ counts }: { counts: Counts }) {
  return (
    <ul className={classes.legend}>
      {KINDS.map(({ key, name }) => (
        <li key={key} data-kind={key}>
          {name} <b>{count(counts[key] ?? 0)}</b>
        </li>
      ))}
    </ul>
  );
}
