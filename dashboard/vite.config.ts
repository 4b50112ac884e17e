import react from "@vitejs/plugin-react";
import { defineConfig } from "vitest/config";

// `npm run dev` connects to the stack that `vcasgd up` started.
const API = process.env.VCASGD_API_URL ?? "http://127.0.0.1:8700";

export default defineConfig({
  plugins: [react()],
  build: {
    outDir: "../vcasgd/api/static",
    emptyOutDir: true,
    // ECharts alone exceeds the default; it is loaded with the first chart.
    chunkSizeWarningLimit: 900,
  },
  server: { proxy: { "/api": API } },
  test: {
    environment: "jsdom",
    include: ["test/**/*.test.{ts,tsx}"],
    setupFiles: ["test/setup.ts"],
    // Tests must not fail on a busy machine.
    testTimeout: 30_000,
  },
});
