import { useComputedColorScheme } from "@mantine/core";
import type { EChartsCoreOption, EChartsType } from "echarts/core";
import { useEffect, useRef, useState } from "react";
import classes from "./Chart.module.css";
import { type Ink, readInk } from "./ink";

/**
 * Chart that keeps its instance while its data changes. `describe` returns the options for the
 * theme's colors; `label` is the text for screen readers.
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
    let instance: EChartsType | undefined;
    let unmounted = false;
    const resize = new ResizeObserver(() => instance?.resize());
    import("./engine").then(({ echarts }) => {
      if (unmounted || !box.current) return;
      instance = echarts.init(box.current);
      resize.observe(box.current);
      setChart(instance);
    });
    return () => {
      unmounted = true;
      resize.disconnect();
      instance?.dispose();
      setChart(null);
    };
  }, []);
  // biome-ignore lint/correctness/useExhaustiveDependencies: the colors change with the scheme
  useEffect(() => {
    if (chart && !chart.isDisposed()) chart.setOption(describe(readInk()), { notMerge: true });
  }, [chart, describe, scheme]);
  return (
    <div ref={box} className={classes.chart} style={{ height }} role="img" aria-label={label} />
  );
}
