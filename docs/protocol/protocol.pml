/* lease -> begin -> push -> blend -> commit: how an update gets into the model exactly once.
 *
 * README.md beside this file maps each part to the code and lists what is out of scope.
 * Each inline *_lua is one Lua script, so it runs atomically (d_step). Everything else may be
 * interleaved at any semicolon: a process that is not scheduled is frozen, or dead.
 */

#ifndef SUBTASKS
#define SUBTASKS 1          /* ranges of samples that workers lease */
#endif
#ifndef SIZE
#define SIZE     2          /* samples of each; 2 allow partial pushes */
#endif
#ifndef LEASES
#define LEASES   2          /* lease tokens that are granted */
#endif
#ifndef INTERVALS
#define INTERVALS 2         /* updates that each worker trains */
#endif
#ifndef LOSSES
#define LOSSES   1          /* how often the tensors server comes back empty */
#endif
#ifndef CUTS
#define CUTS     1          /* answers that are lost */
#endif
#define WORKERS  2
#define SERVERS  2
#define BATCH    2          /* updates in one publication */
#define UNAPPLIED 2         /* unapplied updates of a worker, update_queue.MAX_UNAPPLIED */

#define SAMPLES  (SUBTASKS * SIZE)
#define UPDATES  (WORKERS * INTERVALS)
/* After an answer was lost and a server went back, an update can be in the stream twice; the
 * parameter server refuses the second entry. Spin reports an error if there are more. */
#define ENTRIES  (UPDATES + 2)
#define NOBODY   UPDATES    /* instead of the name of an update */
#define UNKNOWN  (SIZE + 1) /* instead of a position */

#define bit(u)          (1 << (u))
#define has(set, u)     (((set) >> (u)) & 1)
#define max(a, b)       ((a) > (b) -> (a) : (b))

/* --- the tensors server: everything is lost when it comes back empty ----------------------- */

bool meta = true;           /* a snapshot exists */
byte version;
byte writer;                /* token of the server that wrote it */
byte record[SUBTASKS];      /* hash applied: the position of each subtask */
byte content[SAMPLES];      /* its parameters: how often they contain each sample */
byte fence = 1;
byte pushed[SUBTASKS];      /* hash pushed: up to which sample, ... */
byte pusher[SUBTASKS] = NOBODY;     /* ... and by which update */
byte tokens[SUBTASKS];      /* the newest lease token that began a subtask */
byte stream[ENTRIES];       /* entries, the oldest first */
byte waiting;               /* number of entries */
byte payload[UPDATES];      /* chunks u:<update>:* */
byte rejected;              /* set of updates */
byte written;               /* servers whose next version's chunks s:* exist */
#define ABSENT   0
#define VOLATILE 1          /* with an expiry */
#define KEPT     2

/* --- the ledger, which is durable ---------------------------------------------------------- */

byte lease_token;           /* the newest; an older lease of the same subtask may have expired */
byte server_token = 1;      /* the newest parameter server that reported */

/* --- object storage ------------------------------------------------------------------------ */

byte saved_version;
byte saved_record[SUBTASKS];
byte saved_content[SAMPLES];

/* --- updates: their headers, which never change -------------------------------------------- */

byte u_subtask[UPDATES], u_start[UPDATES], u_stop[UPDATES], u_token[UPDATES];

/* --- history, for assertions only ---------------------------------------------------------- */

byte losses, cuts;
byte begun[SUBTASKS];       /* newest lease since the tensors server was empty */
byte took_over = 1;             /* newest server that took over since then */
bool missed;                /* a payload was missing since then; later ones are refused */
bool parted;                /* some update was a part of its subtask */

hidden byte nothing[SAMPLES + BATCH];
hidden byte i_, j_;         /* counters inside a d_step */

/* Invariant 3: every write under a lease carries its token, and a stale token writes nothing. */
#ifdef ONLY_EXACT
#define token_is_newest(condition) skip
#else
#define token_is_newest(condition) assert(condition)
#endif


#define copy(to, from, length) \
    i_ = 0; \
    do :: i_ < (length) -> to[i_] = from[i_]; i_++ :: else -> break od; i_ = 0

/* Invariant 1: the parameters contain what the record says, each sample once. */
#define snapshot_is_exact() \
    i_ = 0; \
    do :: i_ < SAMPLES -> \
            assert(content[i_] == (i_ % SIZE < record[i_ / SIZE] -> 1 : 0)); i_++ \
       :: else -> break \
    od; i_ = 0

/* --- scripts of the ledger ----------------------------------------------------------------- */

/* A lease may expire at any time, so a subtask may be leased at any time. */
inline acquire_lua(token) {
    d_step { lease_token++; token = lease_token }
}

inline reconcile_lua(token, answer) {
    d_step {
        if :: server_token > token -> answer = FENCED
           :: else -> server_token = token; answer = DONE
        fi
    }
}

/* --- scripts of the tensors server --------------------------------------------------------- */

mtype = { STALE, DONE, FENCED, NOSNAPSHOT, REFUSED, INCOMPLETE, THERE, PENDING, APPLIED, LOST, REJECTED };

inline takeover_lua(token, answer) {
    d_step {
        if :: fence > token -> answer = FENCED
           :: else -> fence = token; took_over = max(took_over, token); answer = DONE
        fi
    }
}

inline begin_lua(s, token, answer, position) {
    d_step {
        if :: !meta -> answer = NOSNAPSHOT
#ifndef NO_LEASE_TOKEN
           :: meta && tokens[s] > token -> answer = FENCED
           :: meta && tokens[s] <= token ->
#else
           :: meta ->
#endif
                tokens[s] = token;
                begun[s] = max(begun[s], token);
                position = max(record[s], pushed[s]);
                answer = DONE
        fi
    }
}

/* keep the chunks of a waiting entry, and delete those of any other refused push */
inline settle_payload(u) {
    payload[u] = ABSENT; i_ = 0;
    do :: i_ < waiting -> if :: stream[i_] == u -> payload[u] = KEPT :: else fi; i_++
       :: else -> break
    od; i_ = 0
}

inline push_lua(u, s, answer, position) {
    d_step {
        position = max(record[s], pushed[s]);
        if :: !meta -> answer = NOSNAPSHOT
#ifndef NO_LEASE_TOKEN
           :: meta && tokens[s] > u_token[u] -> settle_payload(u); answer = FENCED
           :: meta && tokens[s] <= u_token[u] ->
#else
           :: meta ->
#endif
                if :: pusher[s] == u ->         /* its answer was lost */
                        payload[u] = (record[s] >= pushed[s] -> ABSENT : KEPT); answer = DONE
#ifndef NO_POSITION_CHECK
                   :: pusher[s] != u && position != u_start[u] ->
                        settle_payload(u); answer = REFUSED
                   :: pusher[s] != u && position == u_start[u] ->
#else
                   :: pusher[s] != u ->
#endif
                        if :: payload[u] == ABSENT -> answer = INCOMPLETE
                           :: else ->
                                token_is_newest(u_token[u] >= begun[s]);
                                tokens[s] = u_token[u];
                                pushed[s] = u_stop[u]; pusher[s] = u;
                                payload[u] = KEPT;
                                stream[waiting] = u; waiting++;
                                answer = DONE
                        fi
                fi
        fi
    }
}

inline status_lua(u, s, answer) {
    d_step {
        if :: !meta -> answer = NOSNAPSHOT
           :: meta && has(rejected, u) -> answer = REJECTED
           :: meta && !has(rejected, u) && record[s] >= u_stop[u] -> answer = APPLIED
           :: meta && !has(rejected, u) && record[s] < u_stop[u] ->
                answer = (pushed[s] >= u_stop[u] -> PENDING : LOST)
        fi
    }
}

/* an installed snapshot resets everything but the fence */
inline clear_waiting() {
    i_ = 0;
    do :: i_ < SUBTASKS -> pushed[i_] = 0; pusher[i_] = NOBODY; tokens[i_] = 0; begun[i_] = 0; i_++
       :: else -> break
    od;
    i_ = 0;
    do :: i_ < ENTRIES -> stream[i_] = 0; i_++ :: else -> break od;
    i_ = 0; waiting = 0; rejected = 0; missed = false
}

/* like commit_lua, it uses the variables of the calling server */
inline install_lua(token, answer) {
    d_step {
        if :: fence > token -> answer = FENCED
           :: fence <= token && meta -> answer = THERE
           :: fence <= token && !meta && !has(written, token) -> answer = INCOMPLETE
           :: else ->
                token_is_newest(token >= took_over);
                fence = token; took_over = token;
                clear_waiting();
                /* an old server's model: the newest server may be further ahead and replace it */
                missed = (server_token > token);
                meta = true; version = m_version + applied;
                writer = (applied > 0 -> token : m_writer);
                copy(record, m_record, SUBTASKS);
                copy(content, m_content, SAMPLES);
                snapshot_is_exact();
                answer = DONE
        fi
    }
}

/* replaces an older snapshot; waiting updates stay, and the ones already applied are refused */
inline replace_lua(token, answer) {
    d_step {
        if :: fence > token -> answer = FENCED
           :: fence <= token && !meta -> answer = NOSNAPSHOT
           :: fence <= token && meta && version >= m_version + applied -> answer = THERE
           :: fence <= token && meta && version < m_version + applied && !has(written, token) ->
                answer = INCOMPLETE
           :: else ->
                token_is_newest(token >= took_over);
                fence = token; took_over = token; missed = true;
                version = m_version + applied; writer = (applied > 0 -> token : m_writer);
                copy(record, m_record, SUBTASKS);
                copy(content, m_content, SAMPLES);
                snapshot_is_exact();
                answer = DONE
        fi
    }
}

/* processed entries leave the stream, and their payloads are deleted */
inline remove_entries(entries) {
    i_ = 0; j_ = 0;
    do :: i_ < waiting ->
            if :: has(entries, stream[i_]) -> payload[stream[i_]] = ABSENT
               :: else -> stream[j_] = stream[i_]; j_++
            fi; i_++
       :: else -> break
    od;
    waiting = j_;
    do :: j_ < i_ -> stream[j_] = 0; j_++ :: else -> break od;
    i_ = 0; j_ = 0
}

#ifdef NO_SERVER_FENCE
#define commit_is_fenced(token) (fence == 0)
#else
#define commit_is_fenced(token) (fence != token)
#endif

inline commit_lua(token, answer) {
    d_step {
        if :: fence == 0 || !meta -> answer = NOSNAPSHOT
           :: fence != 0 && meta && commit_is_fenced(token) -> answer = FENCED
           :: fence != 0 && meta && !commit_is_fenced(token) ->
                if :: applied > 0 && version == m_version + applied -> answer = DONE
#ifndef NO_BASE_CHECK
                   :: !(applied > 0 && version == m_version + applied) && version < m_version ->
                        answer = STALE
                   :: !(applied > 0 && version == m_version + applied) && version > m_version ->
                        answer = FENCED
#endif
                   :: version == m_version && applied > 0 && !has(written, token) ->
                        answer = INCOMPLETE
                   :: else ->
                        token_is_newest(token == took_over);
                        /* push.lua accepts only updates that continue their subtask */
                        assert(missed || refused == 0);
                        if :: applied > 0 ->
                                version = m_version + applied; writer = token;
                                copy(content, m_content, SAMPLES);
                                do :: i_ < SUBTASKS ->      /* only the changed ones */
                                        assert(!has(touched, i_) || m_record[i_] >= record[i_]);
                                        record[i_] = (has(touched, i_) -> m_record[i_] : record[i_]);
                                        i_++
                                   :: else -> break
                                od
                           :: else
                        fi;
                        i_ = 0;
                        do :: i_ < SUBTASKS ->
                                if :: has(reset, i_) -> pushed[i_] = m_record[i_]; pusher[i_] = NOBODY
                                   :: else
                                fi; i_++
                           :: else -> break
                        od;
                        i_ = 0;
                        rejected = rejected | refused;
                        remove_entries(processed);
                        snapshot_is_exact();
                        answer = DONE
                fi
        fi
    }
}

/* --- a worker: worker/trainer.py and worker/update_queue.py ------------------------------ */

#define NONE     0          /* never trained, or forgotten */
#define TO_SEND  1
#define SENDING  2          /* its chunks were written */
#define SENT     3

byte fate[UPDATES];         /* pending updates; global, so that a killed worker loses its own in one step */

/* true if no earlier update of this worker still has to be sent */
#if INTERVALS > 1
#define all_sent  (fate[me * INTERVALS] % 3 == 0 && fate[me * INTERVALS + 1] % 3 == 0)
#else
#define all_sent  (fate[me * INTERVALS] % 3 == 0)
#endif

inline begin_again(u) {     /* Settled.rework */
    if :: token != 0 && s == u_subtask[u] -> position = UNKNOWN :: else fi
}

/* number of unapplied updates, and the position that those of this lease reach */
inline count_pending() {
    unapplied = 0; reached = 0; i_ = me * INTERVALS;
    do :: i_ < (me + 1) * INTERVALS ->
            if :: fate[i_] != NONE ->
                    unapplied++;
                    if :: u_token[i_] == token -> reached = max(reached, u_stop[i_]) :: else fi
               :: else
            fi; i_++
       :: else -> break
    od; i_ = 0
}

inline first(state, u) {    /* the oldest update in a state, NOBODY if there is none */
    u = me * INTERVALS;
    do :: u < (me + 1) * INTERVALS && fate[u] != state -> u++
       :: u < (me + 1) * INTERVALS && fate[u] == state -> break
       :: u >= (me + 1) * INTERVALS -> u = NOBODY; break
    od
}

proctype Worker(byte me) {
    byte token, s, position = UNKNOWN;      /* the lease, and the position of the training */
    byte trained, u, at, unapplied, reached;
    mtype answer;
    bool cut;

end:
    do
    /* lease */
    :: atomic { token == 0 && trained < INTERVALS && lease_token < LEASES &&
                (me == 0 || lease_token > 0) ->         /* worker 0 first, by symmetry */
            acquire_lua(token);
            if :: s = 0
#if SUBTASKS > 1
               :: s = 1
#endif
            fi }
    /* position of the subtask */
    :: atomic { token != 0 && position == UNKNOWN ->
            begin_lua(s, token, answer, at);
            if :: answer == NOSNAPSHOT
               :: answer == FENCED -> token = 0; s = 0
               :: answer == DONE ->
                    d_step { count_pending(); position = max(at, reached) };
                    unapplied = 0; reached = 0
            fi; at = 0; answer = 0 }

    /* interval: the rest of the subtask, or a part of it; the push thread writes its chunks */
    :: atomic { token != 0 && position < SIZE && trained < INTERVALS && all_sent ->
            d_step { count_pending() };
            if :: unapplied < UNAPPLIED ->
                    u = me * INTERVALS + trained; trained++;
                    u_subtask[u] = s; u_start[u] = position; u_token[u] = token;
                    if :: position = SIZE
                       :: position + 1 < SIZE -> position++; parted = true
                    fi;
                    u_stop[u] = position; fate[u] = SENDING; payload[u] = VOLATILE
               :: else
            fi; u = 0; unapplied = 0; reached = 0 }
    /* resend: an update that was lost, or whose answer was lost */
    :: atomic { first(TO_SEND, u);
            if :: u != NOBODY -> payload[u] = VOLATILE; fate[u] = SENDING
               :: else
            fi; u = 0 }
    /* entry */
    :: atomic { first(SENDING, u);
            if :: u != NOBODY ->
                    push_lua(u, u_subtask[u], answer, at);
                    if :: true
                       :: cuts < CUTS -> cuts++; cut = true
                    fi;
                    if :: cut || answer == NOSNAPSHOT || answer == INCOMPLETE -> fate[u] = TO_SEND
                       :: !cut && answer == DONE -> fate[u] = SENT
                       :: !cut && answer == FENCED -> fate[u] = NONE
                       :: !cut && answer == REFUSED ->
                            fate[u] = NONE;
                            if :: at < u_stop[u] -> begin_again(u) :: else fi
                    fi
               :: else
            fi; u = 0; at = 0; answer = 0; cut = false }
    /* fate of the oldest sent update */
    :: atomic { first(SENT, u);
            if :: u != NOBODY ->
                    status_lua(u, u_subtask[u], answer);
                    if :: answer == APPLIED -> fate[u] = NONE
                       :: answer == LOST -> fate[u] = TO_SEND
                       :: answer == REJECTED -> fate[u] = NONE; begin_again(u)
                       :: else
                    fi
               :: else
            fi; u = 0; answer = 0 }

    /* release of the lease, when done or after a notice; pending updates are still sent */
    :: atomic { token != 0 -> token = 0; s = 0; position = UNKNOWN }
    /* kill: the memory is lost, and the lease expires eventually */
    :: atomic { token = 0; s = 0; position = UNKNOWN; u = me * INTERVALS;
            do :: u < (me + 1) * INTERVALS -> fate[u] = NONE; u++ :: else -> break od; u = 0 }
    od
}

/* --- a parameter server: parameter_server/{shard,collect,publish,recovery,model_state}.py ---------- */

inline forget_batch() {
    applied = 0; processed = 0; refused = 0; touched = 0; reset = 0
}

inline refuse(u) {
    refused = refused | bit(u); reset = reset | bit(u_subtask[u])
}

/* Collector._take: the entry was read before; its payload is read now */
inline take(u) {
    d_step {
        answer = DONE;
        if
#ifndef NO_RECORD_CHECK
           :: u_start[u] != m_record[u_subtask[u]] ->
                refuse(u)
           :: u_start[u] == m_record[u_subtask[u]] && payload[u] == ABSENT ->
#else
           :: payload[u] == ABSENT ->
#endif
                if :: !meta -> answer = NOSNAPSHOT
                   :: else -> refuse(u); missed = true
                fi
           :: else ->
                i_ = u_start[u];
                do :: i_ < u_stop[u] -> m_content[u_subtask[u] * SIZE + i_]++; i_++
                   :: else -> break
                od; i_ = 0;
                m_record[u_subtask[u]] = u_stop[u];
                touched = touched | bit(u_subtask[u]);
                applied++
        fi;
        if :: answer == DONE -> processed = processed | bit(u) :: else fi
    }
}

inline published() {
    d_step {
        m_writer = (applied > 0 -> token : m_writer); m_version = m_version + applied;
        forget_batch()
    }
}

/* Recovery._check_newest: the ledger has the newest token, but may be unavailable */
inline check_newest() {
    if :: server_token > token -> goto gone
       :: true
    fi
}

/* versions only count updates: two servers may have different ones with the same number */
#ifdef NO_WRITER_CHECK
#define is_writer(token) true
#else
#define is_writer(token) (writer == token)
#endif

proctype ParameterServer(byte token) {
    byte m_version, m_writer, m_record[SUBTASKS], m_content[SAMPLES];   /* ahead of the published version */
    byte applied, processed, refused, touched, reset;               /* the batch: sets, and a count */
    byte found[BATCH], read, next, stored;
    mtype answer;

    if :: token == 1 -> goto turn :: else fi;       /* the first server is running */
take_over:
    takeover_lua(token, answer);
    if :: answer == FENCED -> goto gone :: else fi;
    atomic {                                /* _from_snapshot, else _from_checkpoint */
        if :: meta ->
                d_step {
                    m_version = version; m_writer = writer;
                    copy(m_record, record, SUBTASKS); copy(m_content, content, SAMPLES)
                };
                goto reconcile
           :: else ->
                d_step {
                    m_version = saved_version; m_writer = token;
                    copy(m_record, saved_record, SUBTASKS);
                    copy(m_content, saved_content, SAMPLES);
                    written = written | bit(token)
                }
        fi
    };
    atomic {
        install_lua(token, answer);
        written = written & ~bit(token);
        if :: answer == FENCED -> goto gone
           :: answer == INCOMPLETE -> goto take_over
           :: else
        fi
    };
reconcile:
    reconcile_lua(token, answer);
    if :: answer == FENCED -> goto gone :: else fi;

turn:
    atomic {                                /* view */
        answer = 0;
        (!meta || waiting > 0 || processed != 0 || version != m_version || fence != token);
        if :: !meta -> goto republish
           :: meta && version < m_version -> goto put_over
           :: meta && version >= m_version -> stored = version
        fi;
        /* a version that this server did not publish, or try to publish, is another server's */
        if :: stored == m_version && is_writer(m_writer)
           :: stored != m_version && stored == m_version + applied && is_writer(token)
           :: else -> goto gone
        fi;
        if :: fence != token -> goto retake :: else fi;
collect:
        if :: processed != 0 && stored != m_version ->  /* committed, only the answer was lost */
                m_version = stored; m_writer = token; d_step { forget_batch() }; stored = 0;
                goto turn
           :: processed != 0 && stored == m_version -> stored = 0; goto write
           :: else -> stored = 0
        fi;
        do :: read < waiting && read < BATCH -> found[read] = stream[read]; read++     /* XRANGE */
           :: else -> break
        od
    };
    atomic {                                /* payloads, check, blend */
        do :: next < read && answer != NOSNAPSHOT -> take(found[next]); next++
           :: else -> break
        od;
        read = 0; next = 0; copy(found, nothing, BATCH);
        if :: processed == 0 -> goto turn :: else fi;
write:
        if :: applied > 0 -> written = written | bit(token) :: else fi
    };
    atomic {
        commit_lua(token, answer);
        written = written & ~bit(token);
        if :: answer == FENCED -> goto gone
           :: answer == NOSNAPSHOT || answer == STALE || answer == INCOMPLETE -> goto turn
           :: answer == DONE && cuts < CUTS -> cuts++; goto turn
           :: answer == DONE -> published(); goto turn
        fi
    };

retake:                                     /* another server took over, or tried to */
    atomic {
        takeover_lua(token, answer);
        if :: answer == FENCED -> goto gone :: else -> goto collect fi
    };

republish:                                  /* Recovery._republish */
    check_newest();
    written = written | bit(token);
    atomic {
        install_lua(token, answer);
        written = written & ~bit(token);
        goto republished
    };
put_over:                                   /* the same, replacing an older snapshot */
    check_newest();
    written = written | bit(token);
    atomic {
        replace_lua(token, answer);
        written = written & ~bit(token);
republished:
        if :: answer == FENCED -> goto gone
           :: answer == INCOMPLETE || answer == NOSNAPSHOT -> goto turn
           :: (answer == DONE || answer == THERE) && cuts < CUTS -> cuts++; goto turn
           :: answer == DONE || answer == THERE -> published(); goto turn
        fi
    };
gone:                                       /* fenced: the process ends */
    atomic {
        forget_batch(); m_version = 0; m_writer = 0; copy(found, nothing, BATCH);
        copy(m_record, nothing, SUBTASKS); copy(m_content, nothing, SAMPLES);
        read = 0; next = 0; stored = 0; answer = 0
    }
}

/* --- faults --------------------------------------------------------------------------------- */

inline lose_everything() {
    d_step {
        losses++;
        meta = false; version = 0; writer = 0; fence = 0; took_over = 0; written = 0;
        clear_waiting();
        i_ = 0;
        do :: i_ < UPDATES -> payload[i_] = ABSENT; i_++ :: else -> break od;
        i_ = 0;
        do :: i_ < SUBTASKS -> record[i_] = 0; i_++ :: else -> break od;
        i_ = 0;
        do :: i_ < SAMPLES -> content[i_] = 0; i_++ :: else -> break od;
        i_ = 0
    }
}

inline checkpoint() {
    d_step {
        saved_version = version;
        copy(saved_record, record, SUBTASKS); copy(saved_content, content, SAMPLES)
    }
}

#if SUBTASKS > 1
#define complete (meta && record[0] == SIZE && record[1] == SIZE)
#else
#define complete (meta && record[0] == SIZE)
#endif

active proctype Fate() {
    atomic {
        run Worker(0); run Worker(1);
        run ParameterServer(1); run ParameterServer(2)
    };
end:
    do
    :: atomic { losses < LOSSES -> lose_everything() }
    /* a checkpoint that is never read need not be written */
    :: atomic { meta && saved_version != version && losses < LOSSES -> checkpoint() }
    /* chunks without an entry expire; one update is enough to show the effect */
    :: atomic { payload[0] == VOLATILE -> payload[0] = ABSENT }
#ifdef GOAL
    /* all work is applied after all faults: expected to be reachable */
    :: atomic { complete && losses == LOSSES && cuts == CUTS && fence == 2 && lease_token == LEASES &&
                parted == (SIZE > 1) -> assert(false) }
#endif
    od
}
