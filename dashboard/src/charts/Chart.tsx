import { useComputedColorScheme } from "@mantine/core";
import type { EChartsCoreOption, EChartsType } from "echarts/core";
import { useEffect, useRef, useState } from "react";
import classes from "./Chart.module.css";
import { type Ink, readInk } from "./ink";

/**
 * A chart that keeps its instance while its data changes. `describe` makes the options from the
 * colours of the theme; `label` is what a screen reader says of it.
 */
export function Chart({
  label,
  height = 220,
  describe,
}: {
  label: string;
  height?: number;
  describe: (ink: Ink) => EChartsCoreOption;
}) {
  const box = useRef<HTMLDivElement>(null);
  const [chart, setChart] = useState<EChartsType | null>(null);
  const scheme = useComputedColorScheme("light");
  useEffect(() => {
    let made: EChartsType | undefined;
    let gone = false;
    const resize = new ResizeObserver(() => made?.resize());
    import("./engine").then(({ echarts }) => {
      if (gone || !box.current) return;
      made = echarts.init(box.current);
      resize.observe(box.current);
      setChart(made);
    });
    return () => {
      gone = true;
      resize.disconnect();
      made?.dispose();
      setChart(null);
    };
  }, []);
  // biome-ignore lint/correctness/useExhaustiveDependencies: the colours change with the scheme
  useEffect(() => {
    if (chart && !chart.isDisposed()) chart.setOption(describe(readInk()), { notMerge: true });
  }, [chart, describe, scheme]);
  return (
    <div ref={box} className={classes.chart} style={{ height }} role="img" aria-label={label} />
  );
}
