import { useQuery } from "@tanstack/react-query";
import { api, body } from "./client";
import { usePolling } from "./live";
import { MACHINES } from "./patches";

export function useStatus() {
  return useQuery({
    queryKey: ["fleet", "status"],
    queryFn: async () => body(await api.GET("/api/v1/status")),
    refetchInterval: usePolling(),
  });
}

export function usePools() {
  return useQuery({
    queryKey: ["fleet", "pools"],
    queryFn: async () => body(await api.GET("/api/v1/pools")),
    refetchInterval: usePolling(),
  });
}

export function useMachines() {
  return useQuery({
    queryKey: MACHINES,
    queryFn: async () => body(await api.GET("/api/v1/machines")),
    refetchInterval: usePolling(),
  });
}

export function useWorkers() {
  return useQuery({
    queryKey: ["fleet", "workers"],
    queryFn: async () => body(await api.GET("/api/v1/workers")),
    refetchInterval: usePolling(),
  });
}

export function useSpend() {
  return useQuery({
    queryKey: ["fleet", "spend"],
    queryFn: async () => body(await api.GET("/api/v1/fleet/spend")),
    refetchInterval: usePolling(),
  });
}

export function useStore() {
  return useQuery({
    queryKey: ["store"],
    queryFn: async () => body(await api.GET("/api/v1/store")),
    refetchInterval: usePolling(),
  });
}
