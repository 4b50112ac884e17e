import { ActionIcon, Tooltip, useComputedColorScheme, useMantineColorScheme } from "@mantine/core";
import { IconLogout, IconMoon, IconSun } from "@tabler/icons-react";
import type { ReactNode } from "react";
import { NavLink } from "react-router";
import { useStore } from "../api/cluster";
import { useLive } from "../api/live";
import { useCaller, useSignOut } from "../api/session";
import type { Session } from "../api/types";
import mark from "../mark.svg";
import { Connection } from "./Connection";
import { Notice } from "./Notice";
import classes from "./Shell.module.css";

const PAGES = [
  { to: "/", name: "Jobs" },
  { to: "/fleet", name: "Fleet" },
  { to: "/store", name: "Store" },
];

/** Frame of every page: navigation, connection state, theme, and sign-out. */
export function Shell({ session, children }: { session: Session; children: ReactNode }) {
  const connection = useLive();
  const signOut = useSignOut();
  const caller = useCaller();
  return (
    <>
      <a className="skip" href="#main">
        Skip to content
      </a>
      <header className={classes.header}>
        <div className={classes.bar}>
          <NavLink to="/" className={classes.name} aria-label="vcasgd, all jobs">
            <img src={mark} width={22} height={22} alt="" />
            vcasgd
          </NavLink>
          <nav className={classes.nav} aria-label="Pages">
            {PAGES.map((page) => (
              <NavLink key={page.to} to={page.to} end={page.to === "/"} className={classes.link}>
                {page.name}
              </NavLink>
            ))}
          </nav>
          <div className={classes.tools}>
            <span className={classes.cluster} title={`vcasgd ${session.version}`}>
              {session.cluster}
            </span>
            <Connection state={connection} />
            <ThemeSwitch />
            <Tooltip
              label={caller ? `Sign out ${caller.name} (scope ${caller.scope})` : "Sign out"}
            >
              <ActionIcon
                variant="subtle"
                color="gray"
                aria-label="Sign out"
                onClick={() => signOut.mutate()}
              >
                <IconLogout size={17} stroke={1.6} />
              </ActionIcon>
            </Tooltip>
          </div>
        </div>
      </header>
      <main id="main" className={classes.main} tabIndex={-1}>
        <FullLedger />
        {children}
      </main>
    </>
  );
}

/** Notice while the ledger accepts no new jobs. */
function FullLedger() {
  const { data } = useStore();
  if (!data?.ledger.full) return null;
  return (
    <Notice tone="bad" title="The ledger is at its memory limit">
      New jobs are refused; running jobs continue, but their histories may have gaps. Delete jobs
      that have ended, or raise the ledger's maxmemory.
    </Notice>
  );
}

function ThemeSwitch() {
  const { setColorScheme } = useMantineColorScheme();
  const dark = useComputedColorScheme("light") === "dark";
  const label = dark ? "Light theme" : "Dark theme";
  return (
    <Tooltip label={label}>
      <ActionIcon
        variant="subtle"
        color="gray"
        aria-label={label}
        onClick={() => setColorScheme(dark ? "light" : "dark")}
      >
        {dark ? <IconSun size={17} stroke={1.6} /> : <IconMoon size={17} stroke={1.6} />}
      </ActionIcon>
    </Tooltip>
  );
}
