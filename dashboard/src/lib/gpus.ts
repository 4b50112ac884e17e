/** GPUs of workers, as their heartbeats report them. */

import type { Worker } from "../api/types";
import { bytes, percent } from "./format";

export function hasGpu(row: Worker): boolean {
  return (row.gpus ?? 0) > 0;
}

/** Returns the bytes in use, or null if they are not known. */
export function gpuMemory(row: Worker): number | null {
  const { gpu_memory_bytes: total, gpu_memory_free_bytes: free } = row;
  return total == null || free == null ? null : total - free;
}

export function memoryInUse(row: Worker): string | null {
  const used = gpuMemory(row);
  return used === null ? null : `${bytes(used)} of ${bytes(row.gpu_memory_bytes)}`;
}

/** Returns the share of the last moments in which the GPU computed. */
export function busy(row: Worker): number | null {
  return row.gpu_utilization == null ? null : row.gpu_utilization / 100;
}

/** Names a worker's GPU, with its use and the memory in use as far as they are known. */
export function gpuUse(row: Worker): string {
  const share = busy(row);
  const parts = [row.device, share === null ? null : `${percent(share, 0)} busy`, memoryInUse(row)];
  return parts.filter(Boolean).join(", ");
}
