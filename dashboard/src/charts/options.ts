import type { EChartsCoreOption } from "echarts/core";
import { timeStep } from "../lib/axis";
import { duration } from "../lib/format";
import type { Ink } from "./ink";

export type Point = [x: number, y: number];

export type Curve = {
  points: Point[];
  /** Color of the theme, or any other one. */
  color: keyof Ink | `#${string}`;
  name: string;
  /** Marks each point; for curves with few points. */
  marked?: boolean;
  /** Drawn behind another curve. */
  faint?: boolean;
  fill?: boolean;
};

/** Axis of a chart; `log` is for values that span several orders of magnitude. */
export type Axis = {
  log?: boolean;
  /** Labels of the axis, and values under the pointer if they have more digits. */
  format: (value: number) => string;
  text?: (value: number) => string;
  /** Distance between two labels. */
  interval?: number;
  min?: number | "dataMin";
  max?: number;
};

/** Pixels on the left of a line chart for the labels of its vertical axis. */
export const GUTTER = 44;

const FONT = { fontFamily: "inherit", fontSize: 11 };

/** Labels of a chart's time axis at most. */
const TIMES = 5;

/** Returns an axis from 0 to `max` seconds with labels at round times. */
export function timeAxis(max: number): Axis {
  return { format: duration, min: 0, max, interval: timeStep(max, TIMES) };
}

/** Returns the options of a line chart. */
export function lines(ink: Ink, x: Axis, y: Axis, curves: Curve[]): EChartsCoreOption {
  return {
    ...frame(ink, x.format, y.text ?? y.format),
    grid: { left: GUTTER, right: 14, top: 12, bottom: 24 },
    xAxis: {
      type: "value",
      min: "dataMin",
      max: "dataMax",
      ...axis(ink, x),
      ...(x.interval === undefined ? {} : { interval: x.interval }),
      // The end of the axis is no round time.
      axisLabel: { ...axis(ink, x).axisLabel, showMaxLabel: x.interval === undefined },
      splitLine: { show: false },
    },
    yAxis: { type: y.log ? "log" : "value", scale: true, splitNumber: 4, ...axis(ink, y) },
    series: curves.map((curve) => ({
      type: "line",
      color: colorOf(ink, curve),
      name: curve.name,
      data: curve.points,
      showSymbol: curve.marked ?? false,
      symbol: "circle",
      symbolSize: 5,
      lineStyle: curve.faint ? { width: 1.2, opacity: 0.3 } : { width: 1.8 },
      areaStyle: curve.fill ? { opacity: 0.1 } : undefined,
    })),
  };
}

function colorOf(ink: Ink, { color }: Curve): string {
  return color.startsWith("#") ? color : ink[color as keyof Ink];
}

/**
 * Returns the options of a line chart whose drawing has exactly the width of its box without the
 * gutter, so that charts over each other share a horizontal axis. The axis has no labels.
 */
export function track(
  ink: Ink,
  x: { from: number; to: number },
  y: Axis,
  curves: Curve[],
): EChartsCoreOption {
  const options = lines(ink, { format: String, min: x.from, max: x.to }, y, curves);
  return {
    ...options,
    grid: { left: GUTTER, right: 0, top: 8, bottom: 8, containLabel: false },
    tooltip: { show: false },
    xAxis: {
      ...(options.xAxis as object),
      axisLabel: { show: false },
      axisLine: { onZero: false, lineStyle: { color: ink.line } },
    },
  };
}

/** Returns the options of a bar chart. */
export function bars(ink: Ink, names: string[], values: number[], y: Axis): EChartsCoreOption {
  return {
    ...frame(ink, String, y.format),
    xAxis: { type: "category", data: names, ...axis(ink, { format: String }) },
    yAxis: { type: "value", splitNumber: 3, ...axis(ink, y) },
    series: [
      {
        type: "bar",
        data: values,
        itemStyle: { color: ink.accent, borderRadius: [2, 2, 0, 0] },
        barMaxWidth: 28,
      },
    ],
  };
}

function frame(ink: Ink, xText: (value: number) => string, yText: (value: number) => string) {
  return {
    animation: false,
    textStyle: FONT,
    grid: { left: 8, right: 14, top: 12, bottom: 4, containLabel: true },
    tooltip: {
      trigger: "axis",
      confine: true,
      backgroundColor: ink.panel,
      borderColor: ink.line,
      padding: [6, 10],
      textStyle: { ...FONT, fontSize: 12, color: ink.text },
      axisPointer: {
        lineStyle: { color: ink.dim },
        label: { formatter: ({ value }: { value: number }) => xText(value) },
      },
      valueFormatter: (value: unknown) => (typeof value === "number" ? yText(value) : ""),
    },
  };
}

/** Returns a format whose label is empty where it would repeat its predecessor. */
export function distinct(format: (value: number) => string) {
  let before = "";
  return (value: number, index: number) => {
    const text = format(value);
    const repeated = index > 0 && text === before;
    before = text;
    return repeated ? "" : text;
  };
}

function axis(ink: Ink, { format, min, max }: Axis) {
  return {
    ...(min === undefined ? {} : { min }),
    ...(max === undefined ? {} : { max }),
    axisLine: { lineStyle: { color: ink.line } },
    axisTick: { show: false },
    axisLabel: { ...FONT, color: ink.dim, formatter: distinct(format), hideOverlap: true },
    splitLine: { lineStyle: { color: ink.line, opacity: 0.7 } },
  };
}
