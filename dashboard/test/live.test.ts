import { afterEach, beforeEach, expect, test, vi } from "vitest";
import { follow, stale, throttled } from "../src/api/live";
import { KEPT, merged } from "../src/api/tail";

/** The browser's own, as far as it is used: what it does on the wire is for the browser test. */
class Source {
  static CLOSED = 2;
  static made: Source[] = [];
  readyState = 0;
  onopen: () => void = () => {};
  onerror: () => void = () => {};
  handlers = new Map<string, (event: unknown) => void>();
  constructor(readonly url: string) {
    Source.made.push(this);
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
  Source.made = [];
  vi.stubGlobal("EventSource", Source);
});
afterEach(() => vi.useRealTimers());

function latest(): Source {
  const source = Source.made.at(-1);
  if (!source) throw new Error("no stream was opened");
  return source;
}

test("a stream that was refused is opened again, later each time, after what was seen", () => {
  const states: string[] = [];
  const news: string[] = [];
  const stop = follow(
    "/x",
    ["job"],
    (_, event) => news.push(event.data),
    (s) => states.push(s),
  );
  latest().onopen();
  latest().handlers.get("job")?.({ data: "one", lastEventId: "7-0" });

  latest().refuse();
  vi.advanceTimersByTime(500);
  expect(latest().url).toBe("/x?after=7-0");
  latest().refuse();
  vi.advanceTimersByTime(500);
  expect(Source.made).toHaveLength(2);
  vi.advanceTimersByTime(500);
  expect(Source.made).toHaveLength(3);
  latest().onopen();

  expect(news).toEqual(["one"]);
  expect(states).toEqual(["live", "broken", "broken", "live"]);
  stop();
  vi.advanceTimersByTime(60_000);
  expect(Source.made).toHaveLength(3);
});

test("a stream that only broke is left to the browser", () => {
  const states: string[] = [];
  const stop = follow(
    "/x",
    [],
    () => {},
    (state) => states.push(state),
  );
  latest().onerror();
  vi.advanceTimersByTime(60_000);
  expect(Source.made).toHaveLength(1);
  expect(states).toEqual(["broken"]);
  stop();
});

test("much news of one kind is one look, and the last is never lost", () => {
  const looks: string[] = [];
  const quiet = throttled((key) => looks.push(key), 1000);
  for (let each = 0; each < 50; each += 1) quiet.call("job");
  quiet.call("store");
  vi.advanceTimersByTime(0);
  expect(looks).toEqual(["job", "store"]);
  quiet.call("job");
  vi.advanceTimersByTime(999);
  expect(looks).toHaveLength(2);
  vi.advanceTimersByTime(1);
  expect(looks).toEqual(["job", "store", "job"]);
});

test("entries that come again are not shown again, and old ones make room", () => {
  const ids = (from: number, number: number) =>
    Array.from({ length: number }, (_, each) => ({ id: String(from + each) }));
  expect(merged(ids(1, 3), ids(3, 2)).map((each) => each.id)).toEqual(["1", "2", "3", "4"]);
  const many = merged(ids(0, KEPT), ids(KEPT, 10));
  expect([many.length, many[0]?.id]).toEqual([KEPT, "10"]);
});

test("news of a job makes old what it may have changed, and nothing of other jobs", () => {
  const keys = [
    ["jobs", "list"],
    ["job", "a", "metrics"],
    ["job", "a", "machines"],
    ["job", "a", "events"],
    ["job", "b", "metrics"],
    ["fleet", "pools"],
    ["store"],
  ];
  const old = (kind: string) => keys.filter(stale(kind, "a")).map((key) => key.join(" "));
  expect(old("job")).toEqual(["jobs list", "job a metrics"]);
  expect(old("event")).toEqual(["job a metrics", "job a machines", "job a events"]);
  expect(old("fleet")).toEqual(["job a machines", "fleet pools"]);
  expect(old("store")).toEqual(["store"]);
});
