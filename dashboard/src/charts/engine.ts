// Only the modules of ECharts that are used; loaded with the first chart.
import { BarChart, LineChart } from "echarts/charts";
import { AriaComponent, GridComponent, TooltipComponent } from "echarts/components";
import * as echarts from "echarts/core";
import { CanvasRenderer } from "echarts/renderers";

echarts.use([BarChart, LineChart, AriaComponent, GridComponent, TooltipComponent, CanvasRenderer]);

export { echarts };
