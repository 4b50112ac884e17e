import type { Cost } from "../api/types";

/** Which part of the price on demand was not paid; null where nothing has a price. */
export function saving(cost: Cost | undefined): number | null {
  return cost && cost.on_demand_usd > 0 ? cost.saved_usd / cost.on_demand_usd : null;
}
