import { QueryClient } from "@tanstack/react-query";
import { afterEach, beforeEach, expect, test, vi } from "vitest";
import { follow, stale, throttled } from "../src/api/live";
import { MACHINES, OVERVIEW, patch } from "../src/api/patches";
import { KEPT, merged } from "../src/api/tail";
import { aBrief, aMachine } from "./factories";

/** Fake EventSource; the browser test covers the real one. */
class Source {
  static CLOSED = 2;
  static created: Source[] = [];
  readyState = 0;
  onopen: () => void = () => {};
  onerror: () => void = () => {};
  handlers = new Map<string, (event: unknown) => void>();
  constructor(readonly url: string) {
    Source.created.push(this);
  }
  addEventListener(kind: string, handler: (event: unknown) => void) {
    this.handlers.set(kind, handler);
  }
  close() {
    this.readyState = Source.CLOSED;
  }
  refuse() {
    this.readyState = Source.CLOSED;
    this.onerror();
  }
}

beforeEach(() => {
  vi.useFakeTimers();
  Source.created = [];
  vi.stubGlobal("EventSource", Source);
});
afterEach(() => vi.useRealTimers());

function latest(): Source {
  const source = Source.created.at(-1);
  if (!source) throw new Error("no stream was opened");
  return source;
}

test("a refused stream reopens after the last event, with growing pauses", () => {
  const states: string[] = [];
  const received: string[] = [];
  const stop = follow(
    "/x",
    ["job"],
    (_, event) => received.push(event.data),
    (s) => states.push(s),
  );
  latest().onopen();
  latest().handlers.get("job")?.({ data: "one", lastEventId: "7-0" });

  latest().refuse();
  vi.advanceTimersByTime(500);
  expect(latest().url).toBe("/x?after=7-0");
  latest().refuse();
  vi.advanceTimersByTime(500);
  expect(Source.created).toHaveLength(2);
  vi.advanceTimersByTime(500);
  expect(Source.created).toHaveLength(3);
  latest().onopen();

  expect(received).toEqual(["one"]);
  expect(states).toEqual(["live", "broken", "broken", "live"]);
  stop();
  vi.advanceTimersByTime(60_000);
  expect(Source.created).toHaveLength(3);
});

test("the browser reopens a broken stream", () => {
  const states: string[] = [];
  const stop = follow(
    "/x",
    [],
    () => {},
    (state) => states.push(state),
  );
  latest().onerror();
  vi.advanceTimersByTime(60_000);
  expect(Source.created).toHaveLength(1);
  expect(states).toEqual(["broken"]);
  stop();
});

test("a hidden tab keeps no connection, of which a browser has six for all tabs", () => {
  const states: string[] = [];
  const show = (visible: boolean) => {
    Object.defineProperty(document, "hidden", { configurable: true, value: !visible });
    document.dispatchEvent(new Event("visibilitychange"));
  };
  show(false);
  const stop = follow(
    "/x",
    ["job"],
    () => {},
    (state) => states.push(state),
  );
  expect(Source.created).toHaveLength(0);
  show(true);
  latest().onopen();
  latest().handlers.get("job")?.({ data: "one", lastEventId: "7-0" });
  show(false);
  expect(latest().readyState).toBe(Source.CLOSED);
  vi.advanceTimersByTime(60_000);
  expect(Source.created).toHaveLength(1);
  show(true);
  expect(latest().url).toBe("/x?after=7-0");
  expect(states).toEqual(["connecting", "live", "connecting", "connecting"]);
  stop();
  show(true);
  expect(Source.created).toHaveLength(2);
});

test("throttled calls are merged, and the last one is never dropped", () => {
  const calls: string[] = [];
  const throttle = throttled((key) => calls.push(key), 1000);
  for (let each = 0; each < 50; each += 1) throttle.call("job");
  throttle.call("store");
  vi.advanceTimersByTime(0);
  expect(calls).toEqual(["job", "store"]);
  throttle.call("job");
  vi.advanceTimersByTime(999);
  expect(calls).toHaveLength(2);
  vi.advanceTimersByTime(1);
  expect(calls).toEqual(["job", "store", "job"]);
});

test("merged drops duplicates and the oldest entries", () => {
  const ids = (from: number, number: number) =>
    Array.from({ length: number }, (_, each) => ({ id: String(from + each) }));
  expect(merged(ids(1, 3), ids(3, 2)).map((each) => each.id)).toEqual(["1", "2", "3", "4"]);
  const many = merged(ids(0, KEPT), ids(KEPT, 10));
  expect([many.length, many[0]?.id]).toEqual([KEPT, "10"]);
});

test("an event makes only related queries stale", () => {
  const keys = [
    ["jobs", "overview"],
    ["job", "a", "metrics"],
    ["job", "a", "machines"],
    ["job", "a", "events"],
    ["job", "b", "metrics"],
    ["fleet", "pools"],
    ["fleet", "machines"],
    ["store"],
  ];
  const staleKeys = (kind: string) => keys.filter(stale(kind, "a")).map((key) => key.join(" "));
  expect(staleKeys("job")).toEqual(["job a metrics"]);
  expect(staleKeys("event")).toEqual(["job a metrics", "job a machines", "job a events"]);
  expect(staleKeys("fleet")).toEqual(["fleet pools"]);
  expect(staleKeys("machines")).toEqual(["job a machines", "fleet pools"]);
  expect(staleKeys("store")).toEqual(["store"]);
});

test("changes are applied to cached lists, and lists that are not cached stay so", () => {
  const queries = new QueryClient();
  const send = (kind: string, data: unknown) => patch(queries, kind, JSON.stringify(data));
  send("machines", { whole: true, changed: [aMachine("a")], removed: [] });
  expect(queries.getQueryData(MACHINES)).toBeUndefined();

  queries.setQueryData(MACHINES, [aMachine("a"), aMachine("b"), aMachine("c")]);
  send("machines", { whole: false, changed: [aMachine("b", "leaving")], removed: ["c"] });
  send("machines", { whole: false, changed: [aMachine("aa")], removed: [] });
  expect(queries.getQueryData(MACHINES)).toEqual([
    aMachine("a"),
    aMachine("aa"),
    aMachine("b", "leaving"),
  ]);
  send("machines", { whole: true, changed: [aMachine("d")], removed: [] });
  expect(queries.getQueryData(MACHINES)).toEqual([aMachine("d")]);

  const old = aBrief({ id: "old-1" });
  queries.setQueryData(OVERVIEW, [old]);
  const created = aBrief({ id: "new-1", created_at: old.created_at + 1 });
  send("job", created);
  send("job", { ...old, state: "succeeded" });
  expect(queries.getQueryData(OVERVIEW)).toEqual([created, { ...old, state: "succeeded" }]);

  queries.setQueryData(["job", "old-1", "view"], old);
  send("fleet", { deleted: ["old-1", "older-1"] });
  expect(queries.getQueryData(OVERVIEW)).toEqual([created]);
  expect(queries.getQueryData(["job", "old-1", "view"])).toBeUndefined();
});
