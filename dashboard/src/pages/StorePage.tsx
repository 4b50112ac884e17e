import { Skeleton } from "@mantine/core";
import { useStore } from "../api/cluster";
import type { StoreNode, StoreView } from "../api/types";
import { ErrorState } from "../components/ErrorState";
import { PageHead } from "../components/PageHead";
import { Panel } from "../components/Panel";
import { Stat, Stats } from "../components/Stats";
import { compact, count, decimal } from "../lib/format";
import { Models } from "./store/Models";
import { Servers } from "./store/Servers";

/** Servers that store models and the ledger. */
export function StorePage() {
  const store = useStore();
  return (
    <div className="stack">
      <PageHead title="Store" />
      {store.isPending && <Skeleton height={200} radius="md" />}
      {store.isError && !store.data && <ErrorState error={store.error} onRetry={store.refetch} />}
      {store.data && <Content store={store.data} />}
    </div>
  );
}

function Content({ store }: { store: StoreView }) {
  const { nodes, ledger } = store;
  return (
    <>
      <Stats>
        <Stat label="Store nodes" value={count(nodes.length)} note="each with a parameter server" />
        <Stat
          label="Snapshots per second"
          value={decimal(
            total(nodes, (node) => node.publications_per_second),
            1,
          )}
          note="published by all nodes"
        />
        <Stat
          label="Updates waiting"
          value={count(total(nodes, (node) => sum(node.queued)))}
          note="pushed, not yet applied"
        />
        <Stat
          label="Operations per second"
          value={compact(total([...nodes, ledger], (server) => server.operations_per_second))}
          note={`${compact(ledger.operations_per_second)} of them in the ledger`}
        />
        <Replication store={store} />
      </Stats>
      <Servers store={store} />
      <Panel
        title="Models"
        empty={
          nodes.some((node) => Object.keys(node.versions ?? {}).length > 0)
            ? undefined
            : "None: parameter servers hold the models of active jobs."
        }
        flush
      >
        <Models nodes={nodes} />
      </Panel>
    </>
  );
}

function Replication({ store }: { store: StoreView }) {
  const servers = [...store.nodes, store.ledger];
  const unreplicated = servers.filter((each) => each.unreplicated_since).length;
  const replicas = total(servers, (each) => each.replicas);
  return (
    <Stat
      label="Replication"
      value={unreplicated ? "Behind" : replicas ? "In sync" : "None"}
      note={
        unreplicated
          ? `${unreplicated} without replicas`
          : replicas
            ? `${count(replicas)} replicas`
            : "servers have no replicas"
      }
      tone={unreplicated ? "bad" : undefined}
    />
  );
}

/** Sums the known values; null if there are none. */
function total<T>(rows: T[], value: (row: T) => number | null | undefined): number | null {
  const values = rows.map(value).filter((each) => each !== null && each !== undefined);
  return values.length ? values.reduce((all, each) => all + each, 0) : null;
}

function sum(counts: StoreNode["queued"]): number {
  return Object.values(counts ?? {}).reduce((all, each) => all + each, 0);
}
