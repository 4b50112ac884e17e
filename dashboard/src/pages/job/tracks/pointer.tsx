import {
  createContext,
  type ReactNode,
  useContext,
  useMemo,
  useState,
  useSyncExternalStore,
} from "react";

/** Position of the pointer on a horizontal axis, from 0 to 1, or null. */
type Position = number | null;

type Pointer = {
  get: () => Position;
  set: (position: Position) => void;
  subscribe: (listener: () => void) => () => void;
};

function makePointer(): Pointer {
  let current: Position = null;
  const listeners = new Set<() => void>();
  return {
    get: () => current,
    set: (position) => {
      if (position === current) return;
      current = position;
      for (const listener of listeners) listener();
    },
    subscribe: (listener) => {
      listeners.add(listener);
      return () => listeners.delete(listener);
    },
  };
}

const PointerContext = createContext<Pointer>(makePointer());

/** Shares one crosshair among all tracks inside; only the parts that show it are rendered again. */
export function SharedPointer({ children }: { children: ReactNode }) {
  const [pointer] = useState(makePointer);
  return <PointerContext value={pointer}>{children}</PointerContext>;
}

export function usePointer(): Position {
  const { subscribe, get } = useContext(PointerContext);
  return useSyncExternalStore(subscribe, get);
}

/** Returns the handlers of an element whose width is that of the axis. */
export function usePointerEvents() {
  const pointer = useContext(PointerContext);
  return useMemo(
    () => ({
      onPointerMove: (event: React.PointerEvent) => {
        const { left, width } = event.currentTarget.getBoundingClientRect();
        const position = (event.clientX - left) / width;
        pointer.set(position >= 0 && position <= 1 ? position : null);
      },
      onPointerLeave: () => pointer.set(null),
    }),
    [pointer],
  );
}
