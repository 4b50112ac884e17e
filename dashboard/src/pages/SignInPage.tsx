import { Button, PasswordInput, Text } from "@mantine/core";
import { type FormEvent, useState } from "react";
import { explained } from "../api/client";
import { useSignIn } from "../api/signIn";
import mark from "../mark.svg";
import classes from "./SignInPage.module.css";

export function SignInPage() {
  const [token, setToken] = useState("");
  const signIn = useSignIn();
  const submit = (event: FormEvent) => {
    event.preventDefault();
    signIn.mutate(token.trim());
  };
  return (
    <main className={classes.page}>
      <form className={classes.form} onSubmit={submit}>
        <img src={mark} width={40} height={40} alt="" />
        <h1 className={classes.title}>Sign in to vcasgd</h1>
        <PasswordInput
          label="Token"
          description={
            <>
              From an admin of the stack. The first one is in the file <code>token</code> of the
              stack's folder, which <code>vcasgd up</code> and <code>vcasgd status</code> print.
            </>
          }
          autoFocus
          autoComplete="current-password"
          value={token}
          onChange={(event) => setToken(event.currentTarget.value)}
          error={signIn.isError && explained(signIn.error)}
        />
        <Button type="submit" fullWidth disabled={!token.trim()} loading={signIn.isPending}>
          Sign in
        </Button>
        <Text size="xs" c="dimmed">
          The browser exchanges the token for a cookie that scripts can't read, and does not store
          it.
        </Text>
      </form>
    </main>
  );
}
