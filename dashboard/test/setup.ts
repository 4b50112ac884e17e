import { cleanup } from "@testing-library/react";
import { afterEach, vi } from "vitest";

// what jsdom has not, and the components ask for
vi.stubGlobal(
  "ResizeObserver",
  class {
    observe() {}
    unobserve() {}
    disconnect() {}
  },
);
vi.stubGlobal("matchMedia", (query: string) => ({
  matches: false,
  media: query,
  addEventListener() {},
  removeEventListener() {},
}));

afterEach(() => {
  cleanup();
});
