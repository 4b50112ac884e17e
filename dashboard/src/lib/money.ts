import type { Cost } from "../api/types";

/** Returns the saved fraction of the on-demand price, or null if there are no prices. */
export function saving(cost: Cost | undefined): number | null {
  return cost && cost.on_demand_usd > 0 ? cost.saved_usd / cost.on_demand_usd : null;
}
