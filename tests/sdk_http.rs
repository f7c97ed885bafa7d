//! The official SDK under the stack, over Streamable HTTP, against a raw server that sends exact bytes: what the
//! callers of reads and writes are told, how many requests the server saw, and which session they used.
//!
//! Time is real, since the connections are; every test ends within a bound.

#[path = "lab/http.rs"]
mod http;
#[path = "lab/sdk.rs"]
mod lab;

use std::{
    future::Future,
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use goaround::{
    Call, CallError, Cause, Delivery, Evidence, Outcome, ReconnectLayer, Refusal, RetryReadOnly, Scope,
    Stack, WriteSafetyLayer,
    mcp::ToolRules,
    sdk::{Client, Connector, Http, HttpError, HttpErrorKind, tool_result},
};
use http::{BlackHole, Era, Gate, JSON, On, Reply, SSE, Seen, Server, appended, no_valid_session};
use lab::{Events, append, builder, check, check_without_a_word, lines, ms, spawn, told, word};
use rmcp::{
    ServiceError,
    model::{CallToolRequestParams, ServerResult, SubscribeRequestParams, UnsubscribeRequestParams},
    transport::{
        StreamableHttpClientTransport,
        streamable_http_client::{StreamableHttpClientTransportConfig, StreamableHttpError},
    },
};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpSocket, TcpStream},
    sync::{Notify, RwLock, Semaphore},
    task::JoinSet,
    time::{Instant, sleep, timeout},
};
use tokio_test::task;

/// Longer than any of these tests takes where nothing hangs.
const BOUND: Duration = Duration::from_secs(30);

async fn bounded<F: Future>(what: &str, future: F) -> F::Output {
    match timeout(BOUND, future).await {
        Ok(output) => output,
        Err(_) => panic!("{what}: hangs"),
    }
}

fn http(server: &Server) -> Connector {
    Connector::http((), server.url().as_str())
}

/// A client on a session of its own, and the server that has seen all of the handshake.
async fn connected(server: &Server, client: &Client) {
    assert_eq!(word(&client.send(lines()).await), "ok");
    server.until(|seen| seen.iter().any(|seen| seen.verb == "GET")).await;
}

/// The calls of tools among requests.
fn calls(seen: &[Seen]) -> Vec<String> {
    seen.iter().filter(|seen| seen.tool().is_some()).map(Seen::brief).collect()
}

// ===== The fault tables =====

/// What comes of a call that meets a fault: its end, and each call that the server sees, with its session.
struct Ends {
    /// A read.
    read: &'static str,
    /// A write without a check. The effect may have come or not.
    write: &'static str,
    /// A write with a check, whose effect has come.
    landed: &'static str,
    /// The same, whose effect has not come.
    absent: &'static str,
}

/// Nobody knows whether it was processed, and the session lives.
const LOST: Ends = Ends {
    read: "ok: lines s1, lines s1",
    write: "unknown: append s1",
    landed: "done: append s1, lines s1",
    absent: "ok: append s1, lines s1, append s1",
};
/// The session is dead. It may be a gateway that says so.
const SESSION: Ends = Ends {
    read: "ok: lines s1, lines s2",
    write: "unknown: append s1",
    landed: "done: append s1, lines s2",
    absent: "ok: append s1, lines s2, append s2",
};
/// Refused before it was processed. Such a server has done nothing.
const REFUSED: Ends = Ends {
    read: "ok: lines s1, lines s1",
    write: "not done: append s1",
    landed: "",
    absent: "not done: append s1",
};
/// The same, and a repetition cannot help.
const FORBIDDEN: Ends = Ends {
    read: "not done: lines s1",
    write: "not done: append s1",
    landed: "",
    absent: "not done: append s1",
};
/// The server's own error.
const ERROR: Ends =
    Ends { read: "error: lines s1", write: "error: append s1", landed: "", absent: "error: append s1" };
/// The server's own result.
const FINE: Ends =
    Ends { read: "ok: lines s1", write: "ok: append s1", landed: "ok: append s1", absent: "ok: append s1" };

struct Row {
    /// What the server answers to the call.
    answer: &'static str,
    reply: Reply,
    ends: &'static Ends,
    /// Whether only time tells that there is no answer.
    silent: bool,
    /// How often the client asks for the rest of the stream.
    resumed: usize,
}

fn row(answer: &'static str, reply: Reply, ends: &'static Ends) -> Row {
    Row { answer, reply, ends, silent: false, resumed: 0 }
}

fn status(status: &str, headers: &[(&str, &str)], body: &str) -> Reply {
    Reply::http(status, headers, body)
}

const HTML: (&str, &str) = ("Content-Type", "text/html");
const PAGE: &str = "<html><body>Something is wrong</body></html>";

fn null(code: i64, message: &str) -> String {
    format!(r#"{{"jsonrpc":"2.0","error":{{"code":{code},"message":"{message}"}},"id":null}}"#)
}

fn without_id(code: i64, message: &str) -> String {
    format!(r#"{{"jsonrpc":"2.0","error":{{"code":{code},"message":"{message}"}}}}"#)
}

/// Table 2.2 of the reference, and what belongs beside it.
fn table() -> Vec<Row> {
    let result = json!({ "content": [], "structuredContent": { "result": [] } });
    let with_id = |id: &str| format!(r#"{{"jsonrpc":"2.0","id":{id},"result":{result}}}"#);
    let no_session = "Bad Request: No valid session ID provided";
    let cut = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 200\r\n\r\n\
        {\"jsonrpc\":\"2.0\",\"id\":$ID,\"res";
    let event = format!("data: {}\n\n", with_id("$ID"));
    vec![
        // ----- bodies and streams that end too early
        row("200 JSON cut in its body", Reply::new().bytes(&cut[..]).close(), &LOST),
        row("200 JSON reset in its body", Reply::new().bytes(&cut[..]).wait(ms(20)).reset(), &LOST),
        row("200 SSE, a comment, the end", Reply::sse().chunk(": hi\n\n").end_of_chunks(), &LOST),
        row("200 SSE, a comment, closed", Reply::sse_until_close().bytes(": hi\n\n").close(), &LOST),
        row("200 SSE, a comment, cut", Reply::sse().chunk(": hi\n\n").close(), &LOST),
        row("200 SSE, half a data line, closed", Reply::sse_until_close().bytes("data: {\"jso").close(), &LOST),
        row("200 SSE, half a data line, cut", Reply::sse().chunk("data: {\"jso").close(), &LOST),
        row("200 SSE, half a data line, reset", Reply::sse().chunk("data: {\"jso").wait(ms(20)).reset(), &LOST),
        row(
            "200 SSE, all but the empty line, closed",
            Reply::sse_until_close().bytes(event.trim_end()).close(),
            &LOST,
        ),
        Row {
            resumed: 1,
            ..row(
                "200 SSE, primed (id, retry), the end, 405 to the GET",
                Reply::sse().chunk("id: e1\nretry: 10\ndata: \n\n").end_of_chunks(),
                &LOST,
            )
        },
        row(
            "200 SSE, progress, the end",
            Reply::sse()
                .chunk(concat!(
                    "data: {\"jsonrpc\":\"2.0\",\"method\":\"notifications/progress\",",
                    "\"params\":{\"progressToken\":$TOKEN,\"progress\":1}}\n\n"
                ))
                .end_of_chunks(),
            &LOST,
        ),
        row("a reset before the answer", Reply::new().reset(), &LOST),
        row("closed before the answer", Reply::new().close(), &LOST),
        row("half a head, closed", Reply::new().bytes("HTTP/1.1 200 OK\r\nContent-Ty").close(), &LOST),
        row("not HTTP", Reply::new().bytes("SSH-2.0-OpenSSH_9.7\r\n").close(), &LOST),
        Row { silent: true, ..row("nothing", Reply::new().stall(), &LOST) },
        Row { silent: true, ..row("200 SSE, nothing", Reply::sse().stall(), &LOST) },
        Row {
            silent: true,
            ..row("200 SSE, half a data line, nothing", Reply::sse().chunk("data: {\"jso").stall(), &LOST)
        },
        Row { silent: true, ..row("half of a JSON body, nothing", Reply::new().bytes(&cut[..]).stall(), &LOST) },
        // ----- statuses
        row("500 text/html", status("500 Internal Server Error", &[HTML], PAGE), &LOST),
        row("502 text/html", status("502 Bad Gateway", &[HTML], PAGE), &LOST),
        row("504 text/html", status("504 Gateway Timeout", &[HTML], PAGE), &LOST),
        row("503", status("503 Service Unavailable", &[HTML], PAGE), &LOST),
        row("503, Retry-After: 0", status("503 Service Unavailable", &[("Retry-After", "0")], ""), &LOST),
        row(
            "503, Retry-After, an error with our id",
            status(
                "503 Service Unavailable",
                &[JSON, ("Retry-After", "0")],
                r#"{"jsonrpc":"2.0","id":$ID,"error":{"code":-32603,"message":"busy"}}"#,
            ),
            &LOST,
        ),
        row("408", status("408 Request Timeout", &[], ""), &LOST),
        row("425", status("425 Too Early", &[], ""), &REFUSED),
        row("429, Retry-After: 0", status("429 Too Many Requests", &[("Retry-After", "0")], ""), &REFUSED),
        row(
            "401, WWW-Authenticate",
            status("401 Unauthorized", &[("WWW-Authenticate", "Bearer realm=\"x\"")], ""),
            &FORBIDDEN,
        ),
        row("401", status("401 Unauthorized", &[JSON], "{}"), &FORBIDDEN),
        row("403", status("403 Forbidden", &[HTML], PAGE), &FORBIDDEN),
        row(
            "403, WWW-Authenticate, a scope",
            status(
                "403 Forbidden",
                &[("WWW-Authenticate", "Bearer error=\"insufficient_scope\", scope=\"write\"")],
                "",
            ),
            &FORBIDDEN,
        ),
        // ----- the session
        row(
            "404, Session not found, id null",
            status("404 Not Found", &[JSON], &null(-32001, "Session not found")).forgets(),
            &SESSION,
        ),
        row(
            "404, Session not found, Python's id",
            status(
                "404 Not Found",
                &[JSON],
                r#"{"jsonrpc":"2.0","id":"server-error","error":{"code":-32600,"message":"Session not found"}}"#,
            )
            .forgets(),
            &SESSION,
        ),
        row("404 text/html", status("404 Not Found", &[HTML], PAGE).forgets(), &SESSION),
        row("404 without a body", status("404 Not Found", &[], "").forgets(), &SESSION),
        row(
            "400, No valid session ID, id null, and it is so",
            status("400 Bad Request", &[JSON], &null(-32000, no_session)).forgets(),
            &SESSION,
        ),
        row(
            "400, No valid session ID, no id, and it is so",
            status("400 Bad Request", &[JSON], &without_id(-32000, no_session)).forgets(),
            &SESSION,
        ),
        row(
            "400, No valid session ID, id null, and it lives",
            status("400 Bad Request", &[JSON], &null(-32000, no_session)),
            &LOST,
        ),
        row(
            "400, Python's id",
            status(
                "400 Bad Request",
                &[JSON],
                r#"{"jsonrpc":"2.0","id":"server-error","error":{"code":-32600,"message":"no"}}"#,
            ),
            &LOST,
        ),
        row("400 text/html", status("400 Bad Request", &[HTML], PAGE), &LOST),
        // ----- answers that are none
        row("202", status("202 Accepted", &[], ""), &LOST),
        row("204", status("204 No Content", &[], ""), &LOST),
        row("200, an error, id null", Reply::json(null(-32603, "no")), &LOST),
        row("200, an error, no id", Reply::json(without_id(-32603, "no")), &LOST),
        row("200, a result of another's id", Reply::json(with_id("4711")), &LOST),
        row("200, a result, id null", Reply::json(with_id("null")), &LOST),
        row("200 JSON without a body", Reply::json(""), &LOST),
        row("200 {}", Reply::json("{}"), &LOST),
        row("200 JSON in chunks, cut", Reply::new()
            .bytes("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
            .crumbs(with_id("$ID")).close(), &LOST),
        row("200, a result without a member", Reply::json(r#"{"jsonrpc":"2.0","id":$ID}"#), &LOST),
        row("200, a notification", Reply::json(
            r#"{"jsonrpc":"2.0","method":"notifications/message","params":{"level":"info","data":1}}"#), &LOST),
        row("200, not JSON", Reply::json("{]"), &LOST),
        row("200 text/html", status("200 OK", &[HTML], PAGE), &LOST),
        row("200 without a type", status("200 OK", &[], &with_id("$ID")), &LOST),
        row("200 SSE without a body", status("200 OK", &[SSE], ""), &LOST),
        row(
            "200 SSE, a result of another's id, the end",
            Reply::sse().chunk(format!("data: {}\n\n", with_id("4711"))).end_of_chunks(),
            &LOST,
        ),
        row("302 to elsewhere", status("302 Found", &[("Location", "http://127.0.0.1:9/")], ""), &LOST),
        row("307 to itself", status("307 Temporary Redirect", &[("Location", "/mcp")], ""), &LOST),
        row("308 to nowhere", status("308 Permanent Redirect", &[], ""), &LOST),
        // ----- answers
        row(
            "400, an error with our id",
            status(
                "400 Bad Request",
                &[JSON],
                r#"{"jsonrpc":"2.0","id":$ID,"error":{"code":-32000,"message":"no"}}"#,
            ),
            &ERROR,
        ),
        row("200, an error with our id", Reply::error(-32603, "no"), &ERROR),
        row("200, our id as a string", Reply::json(with_id("$STRING")), &FINE),
        row("200 JSON", Reply::json(with_id("$ID")), &FINE),
        row("200 JSON with a charset", status("200 OK", &[("Content-Type", "Application/JSON; charset=utf-8")],
            &with_id("$ID")), &FINE),
        row("103, then 200 JSON", Reply::new().bytes("HTTP/1.1 103 Early Hints\r\n\r\n")
            .then_http("200 OK", &[JSON], with_id("$ID")), &FINE),
        row("200 JSON in chunks", Reply::new()
            .bytes("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
            .crumbs(with_id("$ID")).end_of_chunks(), &FINE),
        row("200 JSON until it closes", Reply::new()
            .bytes("HTTP/1.0 200 OK\r\nContent-Type: application/json\r\n\r\n")
            .bytes(with_id("$ID")).close(), &FINE),
        row("200 JSON, late", Reply::new().wait(ms(300)).then_http("200 OK", &[JSON], with_id("$ID")), &FINE),
        row("200 SSE", Reply::sse().chunk(&*event).end_of_chunks(), &FINE),
        row("200 SSE, never ended", Reply::sse().chunk(&*event).stall(), &FINE),
        row("200 SSE, reset after the answer", Reply::sse().chunk(&*event).wait(ms(20)).reset(), &FINE),
    ]
}

#[derive(Clone, Copy, Debug)]
enum Column {
    Read,
    /// A write without a check, whose effect has come.
    WriteLanded,
    WriteAbsent,
    CheckedLanded,
    CheckedAbsent,
    /// With a check that finds nothing, and no fence: nothing is replayed.
    Fenceless,
}

impl Ends {
    fn of(&self, column: Column) -> String {
        match column {
            Column::Read => self.read.to_owned(),
            // Where the effect cannot have come there is only one of them.
            Column::WriteLanded if self.landed.is_empty() => String::new(),
            Column::WriteLanded | Column::WriteAbsent => self.write.to_owned(),
            Column::CheckedLanded => self.landed.to_owned(),
            Column::CheckedAbsent => self.absent.to_owned(),
            Column::Fenceless => match self.landed.strip_prefix("done: ") {
                Some(calls) => format!("unknown: {calls}"),
                None => String::new(),
            },
        }
    }
}

impl Row {
    /// The same in the newer era, which has no sessions and resumes nothing; `None` for what it has not.
    fn expected(&self, column: Column, era: Era) -> Option<String> {
        let ends = self.ends.of(column);
        if ends.is_empty() || (era == Era::Modern && self.ends.read.contains("s2")) {
            return None;
        }
        Some(if era == Era::Modern { ends.replace(" s1", "") } else { ends })
    }

    fn client(&self, column: Column, era: Era, server: &Server, events: &Events) -> Client {
        let mut safety = match column {
            Column::CheckedLanded | Column::CheckedAbsent => WriteSafetyLayer::new(check),
            Column::Fenceless => WriteSafetyLayer::new(check_without_a_word),
            _ => WriteSafetyLayer::refuse(),
        };
        let mut retry = lab::retry();
        if self.silent {
            retry = retry.attempt_timeout(ms(1_000));
            if matches!(column, Column::CheckedLanded | Column::CheckedAbsent | Column::Fenceless) {
                safety = safety.attempt_timeout(ms(1_000));
            }
        }
        let mut connector = http(server);
        if era == Era::Modern {
            connector = connector.lifecycle(modern());
        }
        let stack = builder(connector).deadline(ms(if self.silent { 4_000 } else { 10_000 }));
        stack.writes(safety).retry(retry).on_event(events.sink()).build().expect("nothing is wrong with it")
    }

    /// One call that meets the row's answer. Returns what is wrong.
    async fn fly(&self, column: Column, era: Era) -> Result<(), String> {
        let Some(expected) = self.expected(column, era) else { return Ok(()) };
        let server = Server::of(era).await;
        let events = Events::default();
        let client = self.client(column, era, &server, &events);
        match era {
            Era::Modern => assert_eq!(word(&client.send(lines()).await), "ok"),
            _ => connected(&server, &client).await,
        }
        let before = server.seen().len();

        let (on, request) = match column {
            Column::Read => (On::Tool("lines"), lines()),
            _ => (On::Tool("append"), append("x")),
        };
        let lands = matches!(column, Column::WriteLanded | Column::CheckedLanded);
        server.on(on, if lands { self.reply.clone().after_the_effect() } else { self.reply.clone() });
        let begin = Instant::now();
        let result = client.send(request).await;
        let took = begin.elapsed();
        let seen = server.seen().split_off(before);
        let found = format!("{}: {}", word(&result), calls(&seen).join(", "));

        let mut wrong = self.wrong(&seen, &server, column, era);
        if found != expected {
            wrong.push(format!("{found:?} instead of {expected:?}; {result:?}"));
        }
        // At once, or at the latest at the deadline; on a machine that has much else to do.
        if took > ms(5_000) {
            wrong.push(format!("it took {took:?}"));
        }
        // What nobody can know is reported, once.
        let reports = events.of("in_doubt");
        let unknown = reports.iter().filter(|report| report["outcome"] == "unknown").count();
        if unknown != usize::from(word(&result) == "unknown") {
            wrong.push(format!("reported as unknown {unknown} times: {reports:?}"));
        }
        // The next calls are answered, and the effect came once, or not at all where the caller was told so.
        let next = [client.send(lines()).await, client.send(append("next")).await];
        if next.each_ref().map(word) != ["ok", "ok"] {
            wrong.push(format!("and the next calls: {next:?}"));
        }
        let effects = server.effects().iter().filter(|line| *line == "x").count();
        let replayed = matches!(column, Column::CheckedAbsent) && expected.matches("append").count() > 1;
        if effects != usize::from(lands || replayed) {
            wrong.push(format!("{effects} effects"));
        }
        match wrong.is_empty() {
            true => Ok(()),
            false => Err(format!("{} ({column:?}, {era:?}): {}", self.answer, wrong.join("; "))),
        }
    }

    /// What is wrong with what the server saw, but for the calls themselves.
    fn wrong(&self, seen: &[Seen], server: &Server, column: Column, era: Era) -> Vec<String> {
        let mut wrong = Vec::new();
        let mut ids: Vec<_> =
            seen.iter().filter(|seen| seen.tool().is_some()).map(|seen| seen.id().to_string()).collect();
        let attempts = ids.len();
        ids.sort();
        ids.dedup();
        if ids.len() != attempts && !self.ends.read.contains("s2") {
            wrong.push(format!("two attempts with one id: {ids:?}"));
        }
        let resumed = seen.iter().filter(|seen| seen.header("last-event-id").is_some()).count();
        if resumed != if era == Era::Modern { 0 } else { self.resumed } {
            wrong.push(format!("resumed {resumed} times"));
        }
        let (least, most) = match (era, self.ends.read.contains("s2"), column) {
            (Era::Sessions, false, _) => (1, 1),
            // Where only the caller is told of a write, the new session is left to the next call.
            (Era::Sessions, true, Column::WriteLanded | Column::WriteAbsent) => (1, 2),
            (Era::Sessions, true, _) => (2, 2),
            _ => (0, 0),
        };
        if !(least..=most).contains(&server.sessions()) {
            wrong.push(format!("{} sessions", server.sessions()));
        }
        wrong
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_answer_to_a_call_ends_it_as_the_table_says_and_no_write_runs_twice() {
    use Column::{CheckedAbsent, CheckedLanded, Fenceless, Read, WriteAbsent, WriteLanded};
    let columns = [Read, WriteLanded, WriteAbsent, CheckedLanded, CheckedAbsent, Fenceless];
    fly_all(Era::Sessions, &columns).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn in_the_newer_era_too_every_answer_ends_a_call_as_the_table_says() {
    use Column::{CheckedAbsent, CheckedLanded, Read, WriteLanded};
    fly_all(Era::Modern, &[Read, WriteLanded, CheckedLanded, CheckedAbsent]).await;
}

async fn fly_all(era: Era, columns: &[Column]) {
    let at_once = Arc::new(Semaphore::new(8));
    let mut flights = JoinSet::new();
    for row in table() {
        let row = Arc::new(row);
        for &column in columns {
            let (row, at_once) = (Arc::clone(&row), Arc::clone(&at_once));
            flights.spawn(async move {
                let _permit = at_once.acquire().await.expect("it is never closed");
                match timeout(BOUND, row.fly(column, era)).await {
                    Ok(result) => result,
                    Err(_) => Err(format!("{} ({column:?}, {era:?}): hangs", row.answer)),
                }
            });
        }
    }
    let mut wrong: Vec<String> = flights.join_all().await.into_iter().filter_map(Result::err).collect();
    wrong.sort();
    assert!(wrong.is_empty(), "{} flights went wrong:\n{}", wrong.len(), wrong.join("\n"));
}

#[tokio::test]
async fn in_the_other_lifecycles_a_lost_answer_is_judged_the_same() {
    let auto = rmcp::service::ClientLifecycleMode::Auto {
        preferred_versions: vec![rmcp::model::ProtocolVersion::V_2026_07_28],
        legacy_version: None,
    };
    let lifecycles = [
        (Era::NoSessions, rmcp::service::ClientLifecycleMode::Initialize),
        (Era::NoSessions, auto.clone()),
        (Era::Sessions, auto.clone()),
        (Era::Modern, auto),
    ];
    for (era, lifecycle) in lifecycles {
        for (name, reply) in [
            ("closed", Reply::new().close()),
            ("202", status("202 Accepted", &[], "")),
            ("SSE, the end", Reply::sse().chunk(": hi\n\n").end_of_chunks()),
        ] {
            let what = format!("{era:?}, {lifecycle:?}, {name}");
            let flight = async {
                let server = Server::of(era).await;
                let connector = http(&server).lifecycle(lifecycle.clone());
                let client = builder(connector).check(check).build().unwrap();
                assert_eq!(word(&client.send(lines()).await), "ok", "{what}");
                let before = server.seen().len();
                server.on(On::Tool("lines"), reply.clone());
                assert_eq!(word(&client.send(lines()).await), "ok", "{what}");
                server.on(On::Tool("append"), reply.clone().after_the_effect());
                assert_eq!(word(&client.send(append("a")).await), "done", "{what}");
                server.on(On::Tool("append"), reply.clone());
                assert_eq!(word(&client.send(append("b")).await), "ok", "{what}");
                let seen = calls(&server.seen()[before..]).join(", ").replace(" s1", "");
                assert_eq!(seen, "lines, lines, append, lines, append, lines, append", "{what}");
                assert_eq!(server.effects(), ["a", "b"], "{what}");
            };
            bounded(&what, flight).await;
        }
    }
}

fn modern() -> rmcp::service::ClientLifecycleMode {
    rmcp::service::ClientLifecycleMode::Discover {
        preferred_versions: vec![rmcp::model::ProtocolVersion::V_2026_07_28],
    }
}

// ===== Sessions =====

/// What servers say to a session that they do not know.
fn unknown_sessions() -> [(&'static str, Reply); 5] {
    [
        ("404, JSON", http::session_not_found()),
        ("404, HTML", status("404 Not Found", &[HTML], PAGE)),
        ("404, nothing", status("404 Not Found", &[], "")),
        ("400, id null", no_valid_session()),
        ("400, no id", status("400 Bad Request", &[JSON], &without_id(-32000, "No valid session ID"))),
    ]
}

#[tokio::test]
async fn a_server_that_restarted_while_nothing_was_in_flight_costs_a_read_nothing_but_time() {
    for (name, reply) in unknown_sessions() {
        let server = Server::start().await;
        server.unknown_session(reply);
        let events = Events::default();
        let client = builder(http(&server)).on_event(events.sink()).build().unwrap();
        connected(&server, &client).await;
        server.stop();
        server.start_again().await;
        let read = bounded(name, client.send(lines())).await;
        assert_eq!(word(&read), "ok", "{name}: {read:?}");
        assert_eq!((server.sessions(), client.generation()), (2, Some(2)), "{name}");
        let (incidents, recoveries) = (events.of("incident"), events.of("recovery"));
        assert_eq!((incidents.len(), recoveries.len()), (1, 1), "{name}: {:?}", events.all());
        assert_eq!(word(&client.send(append("x")).await), "ok", "{name}");
        assert_eq!(calls(&server.seen()), ["lines s1", "lines s1", "lines s2", "append s2"], "{name}");
    }
}

#[tokio::test]
async fn a_write_that_meets_a_forgotten_session_is_replayed_only_if_the_caller_trusts_that() {
    for (name, reply) in unknown_sessions() {
        for trusted in [false, true] {
            let server = Server::start().await;
            server.unknown_session(reply.clone());
            let mut safety = WriteSafetyLayer::refuse();
            if trusted {
                safety = safety.trust(Evidence::SessionUnknown);
            }
            let client = builder(http(&server)).writes(safety).build().unwrap();
            connected(&server, &client).await;
            server.forget_sessions();
            let write = bounded(name, client.send(append("x"))).await;
            let (expected, seen) = match trusted {
                true => ("ok", &["lines s1", "append s1", "append s2"][..]),
                false => ("unknown", &["lines s1", "append s1"][..]),
            };
            assert_eq!(word(&write), expected, "{name}: {write:?}");
            if let Err(error) = &write {
                assert!(matches!(error.cause(), Cause::Evidence(Evidence::SessionUnknown)), "{error:?}");
            }
            assert_eq!(calls(&server.seen()), seen, "{name}");
            assert_eq!(word(&client.send(append("y")).await), "ok", "{name}: the next one");
            assert_eq!(server.sessions(), 2, "{name}");
        }
    }
}

#[tokio::test]
async fn a_404_to_the_stray_stream_is_no_lost_session() {
    for reply in [status("404 Not Found", &[HTML], PAGE), http::session_not_found()] {
        let server = Server::start().await;
        server.always(On::Get, reply);
        let client = builder(http(&server)).build().unwrap();
        connected(&server, &client).await;
        for _ in 0..3 {
            assert_eq!(word(&client.send(lines()).await), "ok");
            assert_eq!(word(&client.send(append("x")).await), "ok");
            sleep(ms(20)).await;
        }
        assert_eq!((server.sessions(), client.generation()), (1, Some(1)));
    }
}

#[tokio::test]
async fn an_outage_of_a_gateway_is_not_remembered() {
    // 404 to the call, 404 to the new session, then all is well.
    let server = Server::start().await;
    let client = builder(http(&server)).build().unwrap();
    connected(&server, &client).await;
    let page = || status("404 Not Found", &[HTML], PAGE);
    server.on(On::Tool("lines"), page()).on(On::Method("initialize"), page());
    let read = bounded("404, 404, 200", client.send(lines())).await;
    assert_eq!(word(&read), "ok", "{read:?}");

    // Longer than the call waits: it fails, and the next one is served.
    server.always(On::Any, page());
    let read = bounded("404 for a while", client.send(lines().within(ms(300)))).await;
    assert_ne!(word(&read), "ok");
    let write = bounded("404 for a while", client.send(append("x").within(ms(300)))).await;
    assert_ne!(word(&write), "ok");
    server.heal();
    let next = bounded("the next", client.send(append("y"))).await;
    assert_eq!(word(&next), "ok", "{next:?}");
    assert_eq!(server.effects(), ["y"]);
}

#[tokio::test]
async fn an_answer_by_400_is_the_answer_though_the_session_is_gone_and_what_comes_later_has_a_new_one() {
    for (answer, expected) in [
        (r#""error":{"code":-32000,"message":"no"}"#, "error"),
        (r#""error":"no","result":null"#, "error"),
        (r#""result":{"content":[],"isError":true}"#, "tool error"),
    ] {
        let server = Server::start().await;
        let safety = WriteSafetyLayer::refuse().trust(Evidence::SessionUnknown);
        let client = builder(http(&server)).writes(safety).build().unwrap();
        connected(&server, &client).await;
        let body = format!(r#"{{"jsonrpc":"2.0","id":$ID,{answer}}}"#);
        let reply = status("400 Bad Request", &[JSON], &body).forgets().after_the_effect();
        server.on(On::Tool("append"), reply);
        let write = bounded(answer, client.send(append("x"))).await;
        assert_eq!((word(&write), server.effects()), (expected, vec!["x".to_owned()]), "{write:?}");
        server.until(|seen| seen.iter().any(|seen| seen.method() == "ping")).await;
        assert_eq!(word(&bounded(answer, client.send(lines())).await), "ok");
        assert_eq!(server.sessions(), 2, "{answer}");
    }
}

#[tokio::test]
async fn what_one_call_has_met_of_a_session_says_nothing_of_a_400_that_comes_later() {
    let server = Server::start().await;
    let safety = WriteSafetyLayer::refuse().trust(Evidence::SessionUnknown).independent_writes();
    let client = Arc::new(builder(http(&server)).writes(safety).build().unwrap());
    connected(&server, &client).await;
    let gate = Gate::new();
    let mut writes = Vec::new();
    for nth in 0..8 {
        let reply = Reply::new().executes().gate(&gate);
        server.on(On::Tool("append"), reply.then_http("400 Bad Request", &[HTML], PAGE));
        writes.push(spawn(&client, append(&format!("w{nth}"))));
    }
    server.until_called("append", 8).await;
    // A gateway's: the session lives.
    server.on(On::Tool("lines"), status("404 Not Found", &[], ""));
    assert_eq!(word(&client.send(lines()).await), "ok");
    gate.open(8);
    for write in writes {
        let write = bounded("a write", write).await.unwrap();
        assert_eq!(word(&write), "unknown", "{write:?}");
    }
    assert_eq!(server.effects().len(), 8);
    let pings = server.seen().iter().filter(|seen| seen.brief() == "ping s1").count();
    assert!((1..=8).contains(&pings), "{pings}");
}

/// The SDK says in a request's head what is in its body, from 2026-07-28 on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_is_asked_for_by_a_ping_that_says_of_itself_that_it_is_one() {
    let server = Server::of(Era::NewSessions).await;
    let safety = WriteSafetyLayer::refuse().trust(Evidence::SessionUnknown);
    let client = builder(http(&server)).writes(safety).build().unwrap();
    assert_eq!(word(&client.send(lines()).await), "ok");
    server.on(On::Tool("append"), status("400 Bad Request", &[HTML], PAGE).after_the_effect());
    assert_eq!(word(&client.send(append("a")).await), "unknown");
    assert_eq!((server.effects(), server.sessions()), (vec!["a".to_owned()], 1));
    let seen = server.seen();
    let ping = seen.iter().find(|seen| seen.method() == "ping").unwrap();
    assert_eq!((ping.header("mcp-method"), ping.header("mcp-name")), (Some("ping"), None));
}

/// And one that the server reads and does not take as it is says nothing against the session.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_ping_that_the_server_does_not_take_is_no_sign_of_a_lost_session() {
    let server = Server::start().await;
    let client = builder(http(&server)).build().unwrap();
    assert_eq!(word(&client.send(lines()).await), "ok");
    for code in [-32020, -32601, -32602] {
        let error = format!(r#"{{"jsonrpc":"2.0","id":$ID,"error":{{"code":{code},"message":"no"}}}}"#);
        server.on(On::Tool("lines"), status("400 Bad Request", &[JSON], &error));
        server.on(On::Method("ping"), status("400 Bad Request", &[JSON], &error));
        assert_eq!((word(&client.send(lines()).await), server.sessions()), ("error", 1), "{code}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sixteen_calls_over_a_restart_share_one_new_session_and_each_is_judged_alone() {
    for how in [How::Dies, How::Says404, How::Says400] {
        for checked in [false, true] {
            bounded(&format!("{how:?}"), sixteen(how, checked)).await;
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum How {
    /// All connections close.
    Dies,
    /// It says so to the next call, and finishes every other of those that it has.
    Says404,
    Says400,
}

/// Eight writes and eight reads are in flight when the server restarts, or seven and one that is told so: the SDK
/// sends no more than sixteen at once.
async fn sixteen(how: How, checked: bool) {
    let server = Server::start().await;
    let events = Events::default();
    let safety = match checked {
        true => WriteSafetyLayer::new(check).independent_writes(),
        false => WriteSafetyLayer::refuse(),
    };
    let client = Arc::new(builder(http(&server)).writes(safety).on_event(events.sink()).build().unwrap());
    connected(&server, &client).await;
    let before = server.seen().len();

    // Those with an even number have their effect.
    let gate = Gate::new();
    let answer = |result: &Value| format!(r#"{{"jsonrpc":"2.0","id":$ID,"result":{result}}}"#);
    let held = || Reply::new().gate(&gate);
    let (mut reads, mut writes) = (Vec::new(), Vec::new());
    for nth in 0..8 {
        let (read, write) = match (nth % 2, how) {
            (0, How::Dies) => (held(), held().after_the_effect()),
            (0, _) => (
                held().then_http("200 OK", &[JSON], answer(&json!({ "content": [] }))),
                held().executes().then_http("200 OK", &[JSON], answer(&appended())),
            ),
            (_, _) => (held().close(), held().close()),
        };
        server.on(On::Tool("append"), write);
        if nth < 7 || how == How::Dies {
            server.on(On::Tool("lines"), read);
            reads.push(spawn(&client, lines()));
        }
        writes.push(spawn(&client, append(&format!("w{nth}"))));
        // In their order, so that each meets its script.
        server.until_called("append", nth + 1).await;
    }
    server.until_called("lines", 1 + reads.len()).await;
    if how == How::Dies {
        server.stop();
        server.start_again().await;
    } else {
        server.forget_sessions();
        if how == How::Says400 {
            server.unknown_session(no_valid_session());
        }
        assert_eq!(word(&client.send(lines()).await), "ok", "{how:?}: the one that is told");
        gate.open(15);
    }
    for read in reads {
        let read = read.await.unwrap();
        assert_eq!(word(&read), "ok", "{how:?}: {read:?}");
    }
    for (nth, write) in writes.into_iter().enumerate() {
        let write = write.await.unwrap();
        let expected = match (checked, nth % 2, how) {
            (_, 0, How::Says404 | How::Says400) => "ok",
            (true, 0, _) => "done",
            (true, _, _) => "ok",
            (false, _, _) => "unknown",
        };
        assert_eq!(word(&write), expected, "{how:?}: w{nth}: {write:?}");
    }
    assert_eq!((server.sessions(), client.generation()), (2, Some(2)), "{how:?}: one new session");
    let mut effects = server.effects();
    effects.sort();
    let expected: &[&str] = match checked {
        true => &["w0", "w1", "w2", "w3", "w4", "w5", "w6", "w7"],
        false => &["w0", "w2", "w4", "w6"],
    };
    assert_eq!(effects, expected, "{how:?}");
    let seen = server.seen().split_off(before);
    let count = |call: &str| seen.iter().filter(|seen| seen.brief() == call).count();
    assert_eq!((count("append s1"), count("append s2")), (8, if checked { 4 } else { 0 }), "{how:?}");
    let unknown = events.of("in_doubt").iter().filter(|report| report["outcome"] == "unknown").count();
    let expected = match (checked, how) {
        (true, _) => 0,
        (false, How::Dies) => 8,
        (false, _) => 4,
    };
    assert_eq!(unknown, expected, "{how:?}: each is reported");
}

#[tokio::test]
async fn a_lost_answer_hurts_no_sibling_and_rebuilds_nothing() {
    let server = Server::start().await;
    let client = Arc::new(builder(http(&server)).build().unwrap());
    connected(&server, &client).await;
    let gate = Gate::new();
    let (mut siblings, mut expected) = (Vec::new(), Vec::new());
    for nth in 0..4 {
        server.on(
            On::Tool("append"),
            Reply::new().gate(&gate).executes().then_http(
                "200 OK",
                &[JSON],
                format!(r#"{{"jsonrpc":"2.0","id":$ID,"result":{}}}"#, appended()),
            ),
        );
        siblings.push(spawn(&client, append(&nth.to_string())));
        expected.push(nth.to_string());
        server.until_called("append", nth + 1).await;
    }
    for reply in [Reply::new().reset(), status("202 Accepted", &[], ""), Reply::sse().end_of_chunks()] {
        server.on(On::Tool("append"), reply);
        assert_eq!(word(&client.send(append("lost")).await), "unknown");
    }
    gate.open(4);
    for sibling in siblings {
        let sibling = bounded("a sibling", sibling).await.unwrap();
        assert_eq!(word(&sibling), "ok", "{sibling:?}");
    }
    let mut effects = server.effects();
    effects.sort();
    assert_eq!(effects, expected);
    assert_eq!((server.sessions(), client.generation()), (1, Some(1)));
}

// ===== Retry-After =====

#[tokio::test]
async fn a_wait_that_the_server_asks_for_is_waited_for_if_it_fits_and_told_if_not() {
    for busy in ["429 Too Many Requests", "503 Service Unavailable"] {
        for date in [false, true] {
            let what = format!("{busy}, date: {date}");
            let server = Server::start().await;
            let client = builder(http(&server)).deadline(ms(6_000)).build().unwrap();
            connected(&server, &client).await;
            let after = |seconds: u64| match date {
                true => http::http_date(Duration::from_secs(seconds)),
                false => seconds.to_string(),
            };

            // A date has no fractions of a second.
            let (wait, least) = if date { (2, ms(900)) } else { (1, ms(1_000)) };
            server.on(On::Tool("lines"), status(busy, &[("Retry-After", &after(wait))], ""));
            let begin = Instant::now();
            assert_eq!(word(&client.send(lines()).await), "ok", "{what}");
            let took = begin.elapsed();
            assert!(took >= least && took < ms(4_000), "{what}: {took:?}");

            for (request, expected) in [
                (lines(), "not done"),
                (append("x"), if busy.starts_with("429") { "not done" } else { "unknown" }),
            ] {
                server.on(On::Post, status(busy, &[("Retry-After", &after(30))], ""));
                let begin = Instant::now();
                let result = client.send(request).await;
                assert_eq!(word(&result), expected, "{what}: {result:?}");
                assert!(begin.elapsed() < ms(1_500), "{what}: a wait that does not fit is not begun");
                let told = result.unwrap_err().retry_after().unwrap();
                assert!(told > ms(25_000) && told <= ms(30_000), "{what}: {told:?}");
            }
            assert!(server.effects().is_empty(), "{what}");
            assert_eq!(server.sessions(), 1, "{what}: the connection is kept");
        }
    }
}

#[tokio::test]
async fn a_wait_that_makes_no_sense_is_none() {
    for after in ["-1", "soon", "", "Thu, 01 Jan 1970 00:00:00 GMT", "1.5"] {
        let server = Server::start().await;
        let client = builder(http(&server)).build().unwrap();
        connected(&server, &client).await;
        server.on(On::Tool("lines"), status("429 Too Many Requests", &[("Retry-After", after)], ""));
        let begin = Instant::now();
        let read = bounded(after, client.send(lines())).await;
        assert_eq!(word(&read), "ok", "{after}: {read:?}");
        assert!(begin.elapsed() < ms(3_000), "{after}");
        assert_eq!(server.calls("lines").len(), 3, "{after}");
    }
}

#[tokio::test]
async fn a_wait_longer_than_can_be_counted_is_not_begun() {
    let server = Server::start().await;
    let client = builder(http(&server)).build().unwrap();
    connected(&server, &client).await;
    for (tool, request) in [("lines", lines()), ("append", append("x"))] {
        let seen = server.calls(tool).len();
        let endless = [("Retry-After", "99999999999999999999999999")];
        server.on(On::Tool(tool), status("429 Too Many Requests", &endless, ""));
        let begin = Instant::now();
        let result = bounded(tool, client.send(request)).await;
        assert_eq!(word(&result), "not done", "{tool}: {result:?}");
        assert!(begin.elapsed() < ms(1_500), "{tool}: {:?}", begin.elapsed());
        assert_eq!(result.unwrap_err().retry_after(), Some(Duration::from_secs(u64::MAX)), "{tool}");
        assert_eq!(server.calls(tool).len() - seen, 1, "{tool}");
    }
    assert_eq!((server.effects().len(), server.sessions()), (0, 1));
}

// ===== Streams =====

#[tokio::test]
async fn events_are_read_whatever_their_form_and_borders() {
    let result = json!({ "content": [], "structuredContent": { "result": ["ä", "€", "𝄞"] } });
    let message = format!(r#"{{"jsonrpc":"2.0","id":$ID,"result":{result}}}"#);
    let event = format!("data: {message}\n\n");
    let at_comma = message.replace(",", ",\ndata:");
    let forms = [
        ("as it is", event.clone()),
        ("CRLF", format!("data: {message}\r\n\r\n")),
        ("CR", format!("data: {message}\r\r")),
        ("no space after the colon", format!("data:{message}\n\n")),
        ("an event name", format!("event: message\ndata: {message}\n\n")),
        ("an id", format!("id: 7\ndata: {message}\n\n")),
        ("an id after the data", format!("data: {message}\nid: 7\n\n")),
        ("comments", format!(": one\n\n:two\n:\ndata: {message}\n: three\n\n")),
        ("unknown fields", format!("x-trace: 1\nfoo\n: a\ndata: {message}\nbar: baz\n\n")),
        ("a retry that is no number", format!("retry: soon\ndata: {message}\n\n")),
        ("several data lines", format!("data: {at_comma}\n\n")),
        ("an empty event before it", format!("data: \n\n{event}")),
        ("empty lines before it", format!("\n\n\n{event}")),
        ("another event's name before it", format!("event: ping\ndata: 2026-11-29T00:00:00Z\n\n{event}")),
        ("a notification before it", {
            let log =
                r#"{"jsonrpc":"2.0","method":"notifications/message","params":{"level":"info","data":1}}"#;
            format!("data: {log}\n\n{event}")
        }),
        ("a byte order mark", format!("\u{feff}{event}")),
    ];
    let server = Server::start().await;
    let client = builder(http(&server)).build().unwrap();
    connected(&server, &client).await;
    let mut wrong = Vec::new();
    for (form, text) in &forms {
        let whole = Reply::sse().chunk(text.as_bytes()).end_of_chunks();
        let crumbs = Reply::sse().crumbs(text.as_bytes()).end_of_chunks();
        let closed = Reply::sse_until_close().bytes(text.as_bytes()).close();
        for (borders, reply) in [("whole", whole), ("byte by byte", crumbs), ("closed", closed)] {
            let before = server.calls("lines").len();
            server.on(On::Tool("lines"), reply);
            let result = bounded(form, client.send(lines())).await;
            let attempts = server.calls("lines").len() - before;
            let read = result.as_ref().ok().and_then(told);
            if read.as_deref() != Some(&["ä".to_owned(), "€".to_owned(), "𝄞".to_owned()]) || attempts != 1
            {
                wrong.push(format!("{form}, {borders}: {attempts} attempts, {result:?}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert_eq!(client.generation(), Some(1));
}

/// A stream that ends when it has said how to go on with it.
fn primed(id: &str) -> Reply {
    Reply::sse().chunk(format!("id: {id}\nretry: 10\ndata: \n\n")).end_of_chunks()
}

/// The rest of it.
fn rest() -> Reply {
    Reply::sse()
        .chunk(format!("id: e9\ndata: {{\"jsonrpc\":\"2.0\",\"id\":$CALL,\"result\":{}}}\n\n", appended()))
        .end_of_chunks()
}

/// The ids by which the client asked for the rest of a stream.
fn resumed(server: &Server) -> Vec<String> {
    server.seen().iter().filter_map(|seen| Some(seen.header("last-event-id")?.to_owned())).collect()
}

#[tokio::test]
async fn a_stream_is_resumed_within_its_attempt_and_a_bound() {
    let server = Server::start().await;
    let client = builder(Connector::http((), Http::new(server.url()).resumptions(3))).build().unwrap();
    connected(&server, &client).await;

    // The rest comes on the second and on the third stream: one request, and no other attempt.
    server.on(On::Tool("append"), primed("e1").after_the_effect()).on(On::Get, rest());
    assert_eq!(word(&bounded("once", client.send(append("a"))).await), "ok");
    server.on(On::Tool("append"), primed("e2").after_the_effect());
    server.on(On::Get, primed("e3")).on(On::Get, rest());
    assert_eq!(word(&bounded("twice", client.send(append("b"))).await), "ok");
    assert_eq!(resumed(&server), ["e1", "e2", "e3"]);
    assert_eq!((server.effects().len(), server.calls("append").len()), (2, 2));

    // Never the rest: bounded in their count.
    server.always(On::Get, primed("again"));
    server.on(On::Tool("append"), primed("e4").after_the_effect());
    let write = bounded("for ever", client.send(append("c"))).await;
    assert_eq!(word(&write), "unknown", "{write:?}");
    assert_eq!(resumed(&server)[3..], ["e4", "again", "again"]);

    // Nothing of it carries over to another call.
    server.heal();
    server.on(On::Tool("append"), Reply::sse().chunk(": no id\n\n").end_of_chunks());
    let write = bounded("another", client.send(append("d"))).await;
    assert_eq!((word(&write), resumed(&server).len()), ("unknown", 6), "{write:?}");

    // And bounded in time, by the call's own.
    server.heal();
    server.on(On::Tool("append"), primed("e5")).on(On::Get, Reply::sse().stall());
    let begin = Instant::now();
    let write = bounded("silent", client.send(append("e").within(ms(400)))).await;
    assert_eq!(word(&write), "unknown", "{write:?}");
    assert!(begin.elapsed() < ms(1_500));
    let slow = Reply::sse().chunk("id: e6\nretry: 86400000\ndata: \n\n").end_of_chunks();
    server.on(On::Tool("append"), slow);
    let begin = Instant::now();
    let write = bounded("tomorrow", client.send(append("f").within(ms(400)))).await;
    assert_eq!(word(&write), "unknown", "{write:?}");
    assert!(begin.elapsed() < ms(1_500));
    assert_eq!((server.sessions(), server.effects().len()), (1, 3));
}

#[tokio::test]
async fn a_resumption_never_outlives_its_call_or_its_session() {
    let server = Server::start().await;
    let client = builder(http(&server)).check(check).build().unwrap();
    connected(&server, &client).await;
    // The server is gone when the client wants the rest, and knows nothing of it when it is back.
    server.on(On::Tool("append"), primed("old").after_the_effect().forgets());
    let write = bounded("forgotten", client.send(append("a"))).await;
    assert_eq!(word(&write), "done", "{write:?}");
    let of_the_new = server
        .seen()
        .iter()
        .filter(|seen| seen.session.as_deref() == Some("s2"))
        .filter(|seen| seen.header("last-event-id").is_some())
        .count();
    assert_eq!((server.effects().len(), of_the_new), (1, 0));
}

// ===== Peers that are not there, or say nothing =====

#[tokio::test]
async fn a_server_that_is_not_there_yet_costs_the_calls_before_it_and_no_other() {
    let server = Server::start().await;
    server.stop();
    while tokio::net::TcpStream::connect(server.address()).await.is_ok() {
        tokio::task::yield_now().await;
    }
    let client = builder(http(&server)).build().unwrap();
    for request in [lines(), append("x")] {
        let result = bounded("refused", client.send(request.within(ms(500)))).await;
        assert_eq!(word(&result), "not done", "{result:?}");
        let error = result.unwrap_err();
        assert!(matches!(error.cause(), Cause::ConnectFailed(_) | Cause::Deadline), "{error:?}");
    }
    server.start_again().await;
    let write = bounded("there", client.send(append("y"))).await;
    assert_eq!(word(&write), "ok", "{write:?}");
    assert_eq!(server.effects(), ["y"]);
}

#[tokio::test]
async fn a_refused_connection_sends_nothing_and_a_read_waits_for_the_server() {
    for checked in [false, true] {
        let server = Server::start().await;
        let events = Events::default();
        let safety = match checked {
            true => WriteSafetyLayer::new(check),
            false => WriteSafetyLayer::refuse(),
        };
        // It is attempted anew for a few seconds.
        let patient = backon::ConstantBuilder::new().with_delay(ms(100)).without_max_times();
        let retry = RetryReadOnly.attempts(50).without_budget().backoff(patient);
        let stack = builder(http(&server)).deadline(BOUND).writes(safety).retry(retry);
        let client = Arc::new(stack.on_event(events.sink()).build().unwrap());
        connected(&server, &client).await;
        server.stop();
        while tokio::net::TcpStream::connect(server.address()).await.is_ok() {
            tokio::task::yield_now().await;
        }
        let before = server.seen().len();
        let write = bounded("refused", client.send(append("x").within(ms(400)))).await;
        assert_eq!(word(&write), "not done", "{write:?}");
        let read = bounded("refused", client.send(lines().within(ms(400)))).await;
        assert_eq!(word(&read), "not done", "{read:?}");
        let waiting = spawn(&client, lines());
        sleep(ms(300)).await;
        assert!(!waiting.is_finished());
        assert_eq!(server.seen().len(), before);

        server.start_again().await;
        let read = bounded("there", waiting).await.unwrap();
        assert_eq!(word(&read), "ok", "{read:?}");
        assert_eq!(word(&client.send(append("y")).await), "ok");
        assert_eq!((server.effects(), server.sessions()), (vec!["y".to_owned()], 2));
        // Nothing was sent that there could be a doubt about: no check was asked.
        assert_eq!((server.calls("append").len(), events.of("in_doubt").len()), (1, 0));
    }
}

#[tokio::test]
async fn a_black_hole_takes_a_call_no_longer_than_it_has() {
    let hole = BlackHole::new().await;
    let client = builder(Connector::http((), hole.url().as_str())).build().unwrap();
    for request in [lines(), append("x")] {
        let begin = Instant::now();
        let result = bounded("a black hole", client.send(request.within(ms(400)))).await;
        assert_eq!(word(&result), "not done", "{result:?}");
        assert!(begin.elapsed() < ms(1_500), "{:?}", begin.elapsed());
    }
    let begin = Instant::now();
    client.shutdown(ms(100)).await;
    assert!(begin.elapsed() < ms(3_000), "nor does the end");
}

#[tokio::test]
async fn a_server_that_becomes_a_black_hole_takes_no_call_longer_than_it_has_and_is_found_again() {
    let server = Server::start().await;
    let client = builder(http(&server).probe_timeout(ms(200))).build().unwrap();
    connected(&server, &client).await;
    server.stop();
    let hole = BlackHole::at(server.address()).await;
    for request in [lines(), append("x")] {
        let begin = Instant::now();
        let result = bounded("a black hole", client.send(request.within(ms(400)))).await;
        assert_eq!(word(&result), "not done", "{result:?}");
        assert!(begin.elapsed() < ms(1_500), "{:?}", begin.elapsed());
    }
    drop(hole);
    server.start_again().await;
    let read = bounded("there", client.send(lines())).await;
    assert_eq!(word(&read), "ok", "{read:?}");
    assert_eq!(word(&client.send(append("y")).await), "ok");
    assert_eq!((server.effects(), server.sessions()), (vec!["y".to_owned()], 2));
}

#[tokio::test]
async fn once_a_silent_server_has_failed_the_probe_the_next_call_has_a_new_session() {
    for on in [On::Any, On::Post] {
        let server = Server::start().await;
        let events = Events::default();
        let connector = http(&server).probe_timeout(ms(200));
        let client = Arc::new(builder(connector).on_event(events.sink()).build().unwrap());
        connected(&server, &client).await;
        server.always(on, Reply::new().stall());
        let begin = Instant::now();
        let read = client.send(lines().within(ms(300)));
        let write = client.send(append("x").within(ms(300)));
        let (read, write) = bounded("silence", async { tokio::join!(read, write) }).await;
        assert_eq!((word(&read), word(&write)), ("no answer", "unknown"), "{read:?} {write:?}");
        assert!(begin.elapsed() < ms(1_500), "{:?}", begin.elapsed());
        // The probe.
        server.until(|seen| seen.iter().any(|seen| seen.method() == "ping")).await;
        sleep(ms(400)).await;
        server.heal();
        let next = bounded("the next", client.send(append("y"))).await;
        assert_eq!(word(&next), "ok", "{next:?}");
        assert_eq!((client.generation(), server.sessions()), (Some(2), 2));
        let last = server.calls("append").pop().unwrap();
        assert_eq!(last.session.as_deref(), Some("s2"));
        assert_eq!(server.effects(), ["y"]);
    }
}

#[tokio::test]
async fn a_server_that_is_slow_and_not_silent_keeps_its_session() {
    let server = Server::start().await;
    let client = Arc::new(builder(http(&server).probe_timeout(ms(1_000))).build().unwrap());
    connected(&server, &client).await;
    let gate = Gate::new();
    server.on(
        On::Tool("append"),
        Reply::new().gate(&gate).then_http(
            "200 OK",
            &[JSON],
            format!(r#"{{"jsonrpc":"2.0","id":$ID,"result":{}}}"#, appended()),
        ),
    );
    let sibling = spawn(&client, append("slow"));
    server.until_called("append", 1).await;
    for _ in 0..2 {
        server.on(On::Tool("lines"), Reply::new().stall());
        let read = bounded("slow", client.send(lines().within(ms(200)))).await;
        assert_eq!(word(&read), "no answer", "{read:?}");
        server.until(|seen| seen.iter().any(|seen| seen.method() == "ping")).await;
        sleep(ms(100)).await;
    }
    gate.open(1);
    assert_eq!(word(&bounded("its sibling", sibling).await.unwrap()), "ok");
    assert_eq!((client.generation(), server.sessions()), (Some(1), 1));
}

#[tokio::test]
async fn calls_that_fill_the_sdks_queue_do_not_make_a_session_suspect() {
    let server = Server::start().await;
    let config = StreamableHttpClientTransportConfig::with_uri(server.url()).max_concurrent_requests(2);
    let connector = Connector::http((), config).probe_timeout(ms(200));
    let client = Arc::new(builder(connector).deadline(ms(2_000)).build().unwrap());
    connected(&server, &client).await;
    let gate = Gate::new();
    let slow: Vec<_> = (0..2)
        .map(|_| {
            let body = format!(r#"{{"jsonrpc":"2.0","id":$ID,"result":{}}}"#, appended());
            let answer = Reply::new().gate(&gate).executes().then_http("200 OK", &[JSON], body);
            server.on(On::Tool("append"), answer);
            spawn(&client, append("slow").within(ms(4_000)))
        })
        .collect();
    server.until_called("append", 2).await;
    let third = bounded("queued", client.send(append("queued").within(ms(300)))).await;
    assert_eq!(word(&third), "not done", "{third:?}");
    sleep(ms(500)).await;
    gate.open(2);
    for slow in slow {
        let slow = bounded("slow", slow).await.unwrap();
        assert_eq!(word(&slow), "ok", "{slow:?}");
    }
    assert_eq!(word(&client.send(append("next")).await), "ok");
    assert_eq!((server.effects(), server.sessions()), (vec!["slow".into(), "slow".into(), "next".into()], 1));
    assert_eq!(client.generation(), Some(1));
}

// ===== Cancelling, late answers, progress =====

#[tokio::test]
async fn a_call_that_nobody_waits_for_is_cancelled_by_the_custom_of_its_era() {
    for era in [Era::Sessions, Era::NoSessions, Era::Modern] {
        for dropped in [true, false] {
            let what = format!("{era:?}, dropped: {dropped}");
            let server = Server::of(era).await;
            let mut connector = http(&server);
            if era == Era::Modern {
                connector = connector.lifecycle(modern());
            }
            let events = Events::default();
            let client = Arc::new(builder(connector).on_event(events.sink()).build().unwrap());
            assert_eq!(word(&client.send(lines()).await), "ok", "{what}");
            server.on(On::Tool("append"), Reply::sse().stall());
            let request = append("x");
            let sending = spawn(&client, if dropped { request } else { request.within(ms(300)) });
            server.until_called("append", 1).await;
            let call = server.calls("append").pop().unwrap();
            if dropped {
                sending.abort();
                assert!(sending.await.unwrap_err().is_cancelled());
                assert_eq!(events.of("abandoned").len(), 1, "{what}");
            } else {
                let write = bounded(&what, sending).await.unwrap();
                assert_eq!(word(&write), "unknown", "{what}: {write:?}");
            }
            if era == Era::Modern {
                server.until(|_| server.left(&call)).await;
                assert!(server.requests("notifications/cancelled").is_empty(), "{what}");
            } else {
                server.until(|seen| seen.iter().any(|seen| seen.method() == "notifications/cancelled")).await;
                let cancelled = server.requests("notifications/cancelled");
                assert_eq!(cancelled.len(), 1, "{what}");
                assert_eq!(&cancelled[0].message["params"]["requestId"], call.id(), "{what}");
                assert_eq!(cancelled[0].session, call.session, "{what}");
            }
            assert_eq!(word(&client.send(lines()).await), "ok", "{what}");
        }
    }
}

/// The streams of calls that nobody waits for are let go, whatever the server does with the word of that.
#[tokio::test]
async fn streams_of_calls_that_were_given_up_do_not_pile_up_behind_a_cancellation_that_hangs() {
    const CALLS: usize = 80;
    let server = Server::start().await;
    let client = Arc::new(builder(http(&server)).build().unwrap());
    connected(&server, &client).await;
    server.always(On::Tool("append"), Reply::sse().stall());
    server.always(On::Method("notifications/cancelled"), Reply::new().stall());
    let calls: Vec<_> = (0..CALLS).map(|_| spawn(&client, append("x").within(ms(1_000)))).collect();
    server.until_called("append", CALLS).await;
    for call in calls {
        assert_eq!(word(&bounded("given up", call).await.unwrap()), "unknown");
    }
    let begin = Instant::now();
    let all_left = |seen: &[Seen]| {
        seen.iter().filter(|seen| seen.tool() == Some("append")).all(|call| server.left(call))
    };
    server.until(all_left).await;
    assert!(begin.elapsed() < ms(3_000), "{:?}", begin.elapsed());
    // A server that does not take them is not sent more and more of them.
    let cancelled =
        |seen: &[Seen]| seen.iter().filter(|seen| seen.method() == "notifications/cancelled").count();
    server.until(|seen| cancelled(seen) >= 64).await;
    // It answers everything else, so that the session goes on.
    assert_eq!(word(&client.send(lines()).await), "ok");
    assert_eq!((cancelled(&server.seen()), client.generation()), (64, Some(1)));
}

#[tokio::test]
async fn what_was_sent_on_a_session_that_is_gone_is_not_cancelled_on_the_next() {
    let server = Server::start().await;
    let client = Arc::new(builder(http(&server)).build().unwrap());
    connected(&server, &client).await;
    server.on(On::Tool("append"), Reply::sse().stall());
    let sending = spawn(&client, append("x"));
    server.until_called("append", 1).await;
    server.forget_sessions();
    assert_eq!(word(&client.send(lines()).await), "ok");
    sending.abort();
    let _ = sending.await;
    sleep(ms(200)).await;
    assert_eq!(word(&client.send(lines()).await), "ok");
    let onto_the_new = server
        .requests("notifications/cancelled")
        .into_iter()
        .filter(|seen| seen.session.as_deref() != Some("s1"))
        .count();
    assert_eq!((onto_the_new, server.sessions()), (0, 2));
}

#[tokio::test]
async fn a_late_answer_is_nobody_elses() {
    let server = Server::start().await;
    let client = Arc::new(builder(http(&server)).build().unwrap());
    connected(&server, &client).await;
    let gate = Gate::new();
    let late = json!({ "content": [], "structuredContent": { "result": ["late"] } });
    server.on(
        On::Tool("lines"),
        Reply::sse()
            .gate(&gate)
            .chunk(format!("data: {{\"jsonrpc\":\"2.0\",\"id\":$ID,\"result\":{late}}}\n\n"))
            .end_of_chunks(),
    );
    let first = bounded("late", client.send(lines().within(ms(200)))).await;
    assert_eq!(word(&first), "no answer", "{first:?}");
    let second = spawn(&client, lines());
    gate.open(1);
    let second = bounded("its own", second).await.unwrap().unwrap();
    assert_eq!(told(&second).unwrap(), Vec::<String>::new());
    assert_eq!(client.generation(), Some(1));
}

#[tokio::test]
async fn a_success_that_nobody_took_is_a_late_one_whatever_the_sdk_can_read_of_it() {
    let answers = [
        (r#"{"jsonrpc":"2.0","id":$ID,"result":{"content":[]}}"#, 1),
        (r#"{"jsonrpc":"1.0","id":$ID,"result":{"content":[]}}"#, 1),
        (r#"{"jsonrpc":"1.0","id":$ID,"error":1}"#, 0),
    ];
    for ((answer, reports), is_stream) in answers.into_iter().flat_map(|row| [(row, false), (row, true)]) {
        let server = Server::start().await;
        let events = Events::default();
        let client = Arc::new(builder(http(&server)).on_event(events.sink()).build().unwrap());
        connected(&server, &client).await;
        let gate = Gate::new();
        let reply = match is_stream {
            true => Reply::sse().gate(&gate).chunk(format!("data: {answer}\n\n")).end_of_chunks(),
            false => Reply::new().gate(&gate).then_http("200 OK", &[JSON], answer),
        };
        server.on(On::Tool("append"), reply);
        let mut call = task::spawn(client.send(append("x")));
        assert!(call.poll().is_pending());
        server.until_called("append", 1).await;
        while call.is_woken() {
            assert!(call.poll().is_pending());
            sleep(ms(20)).await;
        }
        gate.open(1);
        bounded("answered", async {
            while !call.is_woken() {
                sleep(ms(5)).await;
            }
        })
        .await;
        drop(call);
        assert_eq!(events.of("late_answer").len(), reports, "{answer}, a stream: {is_stream}");
        assert_eq!(word(&client.send(lines()).await), "ok");
    }
}

#[tokio::test]
async fn progress_for_ever_does_not_outlast_the_hard_maximum() {
    let progress = concat!(
        "data: {\"jsonrpc\":\"2.0\",\"method\":\"notifications/progress\",",
        "\"params\":{\"progressToken\":$TOKEN,\"progress\":1}}\n\n"
    );
    for idle in [false, true] {
        let server = Server::start().await;
        let client = builder(http(&server)).build().unwrap();
        connected(&server, &client).await;
        server.on(On::Tool("append"), Reply::sse().repeat(ms(20), progress));
        let mut request = append("x").within(ms(1_000));
        if idle {
            request = request.idle(ms(300));
        }
        let begin = Instant::now();
        let write = bounded("for ever", client.send(request)).await;
        let took = begin.elapsed();
        assert_eq!(word(&write), "unknown", "{write:?}");
        assert!(took >= ms(900) && took < ms(2_500), "idle: {idle}: {took:?}");

        // And without progress the idle limit ends it, others' progress or not.
        let others = progress.replace("$TOKEN", "4711");
        server.on(On::Tool("append"), Reply::sse().repeat(ms(20), others));
        let begin = Instant::now();
        let write = bounded("idle", client.send(append("x").within(ms(3_000)).idle(ms(300)))).await;
        let took = begin.elapsed();
        assert_eq!(word(&write), "unknown", "{write:?}");
        assert!(took >= ms(250) && took < ms(1_500), "{took:?}");
        assert_eq!(client.generation(), Some(1));
    }
}

// ===== Large answers =====

#[tokio::test]
async fn ten_megabytes_are_an_answer() {
    let server = Server::start().await;
    let client = builder(http(&server)).deadline(Duration::from_secs(20)).build().unwrap();
    connected(&server, &client).await;
    let text = "0123456789".repeat(1 << 20);
    let result = json!({ "content": [{ "type": "text", "text": text }] });
    let replies =
        [("lines", lines(), Reply::result(&result)), ("append", append("x"), Reply::sse_result(&result))];
    for (tool, request, reply) in replies {
        server.on(On::Tool(tool), reply);
        let ServerResult::CallToolResult(result) = bounded("large", client.send(request)).await.unwrap()
        else {
            panic!("another kind of result")
        };
        let length = result.content[0].as_text().unwrap().text.len();
        assert_eq!(length, 10 << 20);
    }
    assert_eq!((server.calls("lines").len(), server.calls("append").len()), (2, 1));
}

#[tokio::test]
async fn an_answer_above_the_limit_is_an_answer_that_was_lost_and_nothing_is_repeated() {
    let server = Server::start().await;
    let config = StreamableHttpClientTransportConfig::with_uri(server.url())
        .max_json_response_size(4 << 10)
        .max_sse_event_size(4 << 10);
    let client = builder(Connector::http((), config)).build().unwrap();
    connected(&server, &client).await;
    let result = json!({ "content": [{ "type": "text", "text": "x".repeat(5 << 10) }] });
    for reply in [Reply::result(&result), Reply::sse_result(&result)] {
        server.on(On::Tool("append"), reply.clone().after_the_effect());
        let error = bounded("large", client.send(append("x"))).await.unwrap_err();
        assert_eq!((error.outcome(), error.may_have_landed()), (Outcome::Answered, true), "{error:?}");
        server.on(On::Tool("lines"), reply);
        let error = bounded("large", client.send(lines())).await.unwrap_err();
        assert_eq!(error.outcome(), Outcome::Answered, "{error:?}");
    }
    assert_eq!((server.calls("append").len(), server.calls("lines").len()), (2, 3));
    assert_eq!((word(&client.send(lines()).await), client.generation()), ("ok", Some(1)));
}

// ===== Redirects and credentials =====

#[tokio::test]
async fn a_redirect_is_a_clear_error_and_sends_nothing_elsewhere() {
    let elsewhere = Server::start().await;
    for redirect in [
        "301 Moved Permanently",
        "302 Found",
        "303 See Other",
        "307 Temporary Redirect",
        "308 Permanent Redirect",
    ] {
        let server = Server::start().await;
        let client = builder(http(&server)).build().unwrap();
        connected(&server, &client).await;
        let before = server.seen().len();
        server.always(On::Any, status(redirect, &[("Location", &elsewhere.url())], ""));
        for (request, outcome) in [(append("x"), Outcome::Unknown), (lines(), Outcome::NoAnswer)] {
            let error = bounded(redirect, client.send(request)).await.unwrap_err();
            assert_eq!(error.outcome(), outcome, "{redirect}: {error:?}");
            let number: u16 = redirect[..3].parse().unwrap();
            let http = error.get_ref::<goaround::sdk::HttpError>().unwrap();
            assert_eq!(http.status(), Some(number), "{redirect}: {error:?}");
            assert!(error.to_string().contains("redirect"), "{redirect}: {error}");
            assert!(!error.to_string().contains(&elsewhere.address().port().to_string()), "{error}");
        }
        assert_eq!(calls(&server.seen()[before..])[0], "append s1");
        assert_eq!(server.calls("append").len(), 1);

        // At the handshake.
        let client = builder(http(&server)).build().unwrap();
        let error = bounded(redirect, client.send(append("x").within(ms(400)))).await.unwrap_err();
        assert_eq!(error.outcome(), Outcome::NotDone, "{redirect}: {error:?}");
    }
    assert!(elsewhere.seen().is_empty());
}

#[tokio::test]
async fn a_refusal_is_a_clear_error_without_anything_of_its_headers() {
    use std::error::Error;

    /// The texts of an error and of all that it came from.
    fn texts(error: &CallError) -> String {
        let mut texts = format!("{error}\n{error:?}\n");
        let mut source = error.source();
        while let Some(inner) = source {
            texts += &format!("{inner}\n{inner:?}\n");
            source = inner.source();
        }
        texts
    }
    let challenge = [
        ("WWW-Authenticate", "Bearer scope=\"secret\", resource_metadata=\"https://secret.example\""),
        ("Retry-After", "secret"),
        ("Content-Type", "text/secret"),
    ];
    let refusals = [
        ("401 Unauthorized", Some(Evidence::Unauthorized)),
        ("403 Forbidden", Some(Evidence::Forbidden)),
        ("429 Too Many Requests", Some(Evidence::TooManyRequests)),
        ("500 Internal Server Error", None),
        ("200 OK", None),
    ];
    for foreign in [false, true] {
        let server = Server::start().await;
        let connector = || match foreign {
            false => http(&server),
            true => replaying(&server, ms(5_000)),
        };
        let client = builder(connector()).deadline(ms(500)).build().unwrap();
        connected(&server, &client).await;
        for (code, evidence) in refusals {
            for (tool, request) in [("append", append("x")), ("lines", lines())] {
                server.always(On::Tool(tool), status(code, &challenge, ""));
                let error = bounded(code, client.send(request)).await.unwrap_err();
                server.heal();
                if let Some(evidence) = evidence {
                    assert!(
                        matches!(error.cause(), Cause::Evidence(found) if *found == evidence),
                        "{error:?}"
                    );
                    assert_eq!(error.outcome(), Outcome::NotDone);
                }
                let texts = texts(&error);
                assert!(!texts.contains("secret"), "{foreign} {code}: {texts}");
            }
        }
        assert_eq!((server.sessions(), server.effects().len()), (1, 0));

        for (code, _) in refusals {
            let client = builder(connector()).deadline(ms(500)).build().unwrap();
            server.always(On::Method("initialize"), status(code, &challenge, ""));
            let error = bounded(code, client.send(append("x"))).await.unwrap_err();
            server.heal();
            assert_eq!(error.outcome(), Outcome::NotDone);
            let texts = texts(&error);
            assert!(!texts.contains("secret"), "{foreign} {code}, in the handshake: {texts}");
        }
    }
}

#[tokio::test]
async fn credentials_are_refreshed_once_though_the_call_that_asked_first_gives_up() {
    let server = Server::start().await;
    let count = || Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let (begun, ended) = (count(), count());
    let (begins, ends) = (Arc::clone(&begun), Arc::clone(&ended));
    let connector = http(&server).on_unauthorized(move |_| {
        // A refresh token is good for one use.
        begins.fetch_add(1, Ordering::Relaxed);
        let ends = Arc::clone(&ends);
        async move {
            sleep(ms(800)).await;
            ends.fetch_add(1, Ordering::Relaxed);
            Ok("fresh".to_owned())
        }
    });
    let client = Arc::new(builder(connector).build().unwrap());
    connected(&server, &client).await;
    for _ in 0..2 {
        server.on(On::Tool("lines"), status("401 Unauthorized", &[], ""));
    }
    let first = spawn(&client, lines().within(ms(400)));
    server.until_called("lines", 2).await;
    let second = spawn(&client, lines());
    assert_eq!(word(&bounded("given up", first).await.unwrap()), "no answer");
    assert_eq!(word(&bounded("refreshed", second).await.unwrap()), "ok");
    let times = [begun, ended].map(|times| times.load(Ordering::Relaxed));
    assert_eq!(times, [1, 1], "begun, ended");
}

#[tokio::test]
async fn credentials_are_refreshed_once_for_all_who_wait_and_reads_are_replayed() {
    let server = Server::start().await;
    let refreshed = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let count = Arc::clone(&refreshed);
    let connector = http(&server).on_unauthorized(move |unauthorized: goaround::sdk::Unauthorized| {
        count.fetch_add(1, Ordering::Relaxed);
        async move {
            assert_eq!(unauthorized.challenge(), Some("Bearer"));
            sleep(ms(100)).await;
            Ok("fresh".to_owned())
        }
    });
    let client = Arc::new(builder(connector).build().unwrap());
    connected(&server, &client).await;
    let before = server.seen().len();
    let gate = Gate::new();
    for _ in 0..8 {
        server.on(
            On::Tool("lines"),
            Reply::new().gate(&gate).then_http("401 Unauthorized", &[("WWW-Authenticate", "Bearer")], ""),
        );
    }
    server.on(
        On::Tool("append"),
        Reply::new().gate(&gate).then_http("401 Unauthorized", &[("WWW-Authenticate", "Bearer")], ""),
    );
    let reads: Vec<_> = (0..8).map(|_| spawn(&client, lines())).collect();
    let write = spawn(&client, append("x"));
    server.until_called("lines", 9).await;
    server.until_called("append", 1).await;
    gate.open(9);
    for read in reads {
        let read = bounded("refreshed", read).await.unwrap();
        assert_eq!(word(&read), "ok", "{read:?}");
    }
    let write = bounded("refreshed", write).await.unwrap();
    assert_eq!(word(&write), "not done", "not replayed, and nothing was done: {write:?}");
    assert_eq!(refreshed.load(Ordering::Relaxed), 1);
    let seen = server.seen().split_off(before);
    let fresh = seen.iter().filter(|seen| seen.header("authorization") == Some("Bearer fresh")).count();
    assert_eq!(fresh, 8);
    assert_eq!(word(&client.send(append("y")).await), "ok");
    assert_eq!((server.effects(), server.sessions()), (vec!["y".to_owned()], 1));
}

// ===== What has no connection =====

/// The address of a port that nobody listens to.
async fn nobody() -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    format!("http://{}/mcp?key=hunter2", listener.local_addr().unwrap())
}

#[tokio::test]
async fn a_handshake_over_http_that_fails_says_by_what() {
    use HttpErrorKind as Kind;
    let http = |status: &str| Reply::http(status, &[], "hunter2");
    let nobody = nobody().await;
    let nowhere = format!("http://{}/mcp?key=hunter2", "a".repeat(64));
    let refused = "cannot connect to the server: connection refused";
    let mut rows = vec![
        (Some(nobody), None, Kind::Connect, None, refused),
        (
            Some(nowhere),
            None,
            Kind::Connect,
            None,
            "cannot connect to the server: its host's name cannot be resolved",
        ),
    ];
    let failed = "the server answered with an error status (HTTP 404)";
    rows.push((None, Some((On::Post, http("404 Not Found"))), Kind::Status, Some(404), failed));
    let denied = "the credentials were refused (HTTP 401)";
    rows.push((None, Some((On::Post, http("401 Unauthorized"))), Kind::Unauthorized, Some(401), denied));
    let away = "the server redirects; use the address that it names (HTTP 307)";
    rows.push((None, Some((On::Post, http("307 Temporary Redirect"))), Kind::Redirect, Some(307), away));
    let other = "the response is neither JSON nor a stream of events";
    rows.push((None, Some((On::Post, http("200 OK"))), Kind::ContentType, None, other));
    let broken = "the connection broke before a response came";
    rows.push((None, Some((On::Post, Reply::new().close())), Kind::NoResponse, None, broken));
    let second = On::Method("notifications/initialized");
    let failed = "the server answered with an error status (HTTP 500)";
    rows.push((None, Some((second, http("500 Internal Server Error"))), Kind::Status, Some(500), failed));
    for (url, reply, kind, status, text) in rows {
        let server = Server::start().await;
        if let Some((on, reply)) = reply {
            server.always(on, reply);
        }
        let url = url.unwrap_or_else(|| server.url());
        for foreign in [false, true] {
            let of_url = url.clone();
            let connector = match foreign {
                false => Connector::http((), url.as_str()),
                true if kind != Kind::Connect => continue,
                true => Connector::new((), move || {
                    let config = StreamableHttpClientTransportConfig::with_uri(of_url.as_str());
                    Ok(StreamableHttpClientTransport::with_client(reqwest::Client::new(), config))
                }),
            };
            let client = builder(connector).deadline(BOUND).retry(RetryReadOnly.attempts(1)).build().unwrap();
            let error = bounded("a call", client.send(lines())).await.unwrap_err();
            let said = error.to_string();
            assert_eq!(error.outcome(), Outcome::NotDone, "{error:?}");
            let http = error.get_ref::<HttpError>().unwrap_or_else(|| panic!("{error}"));
            assert_eq!((http.kind(), http.status()), (kind, status), "{said}");
            let begin = "not done: tools/call: cannot connect: the handshake failed: ";
            // Who resolves names for a client of the caller's nobody knows.
            let text =
                if foreign && !text.contains("refused") { "cannot connect to the server" } else { text };
            assert_eq!(said, format!("{begin}{text}"));
            // The chain goes on to the SDK's error.
            let of_sdk = error.get_ref::<rmcp::service::ClientInitializeError>();
            assert!(of_sdk.is_some() && !said.contains("hunter2"), "{said}");
        }
    }
}

#[tokio::test]
async fn a_call_that_finds_the_server_gone_says_that_no_connection_was_made() {
    let server = Server::start().await;
    let client = builder(http(&server)).deadline(ms(3_000)).retry(RetryReadOnly.attempts(1)).build().unwrap();
    connected(&server, &client).await;
    server.stop();
    let error = bounded("a call", client.send(lines())).await.unwrap_err();
    assert_eq!(error.outcome(), Outcome::NotDone, "{error:?}");
    let text = error.to_string();
    assert!(text.contains("cannot connect to the server: connection refused"), "{text}");
}

/// This build of the tests has no TLS.
#[test]
fn an_https_address_without_tls_is_an_error_of_build_that_names_the_features() {
    for url in ["https://example.org/mcp", "HTTPS://10.0.0.1:8443/"] {
        let error = builder(Connector::http((), url)).build().unwrap_err().to_string();
        assert!(
            error.starts_with("wrong configuration: cannot connect to the server: this build has no TLS"),
            "{error}"
        );
        assert!(error.contains("`reqwest`") && error.contains("`reqwest-native-tls`"), "{error}");
    }
    // Of a client of the caller's nobody knows before it is asked.
    let own = Http::new("https://example.org/mcp").client(reqwest::Client::new());
    builder(Connector::http((), own)).build().unwrap();
}

#[tokio::test]
async fn a_client_of_the_callers_without_tls_is_named_when_it_is_asked() {
    let own = Http::new("https://127.0.0.1:1/mcp").client(reqwest::Client::new());
    let client = builder(Connector::http((), own)).retry(RetryReadOnly.attempts(1)).build().unwrap();
    let error = bounded("a call", client.send(lines())).await.unwrap_err();
    assert_eq!(error.get_ref::<HttpError>().unwrap().kind(), HttpErrorKind::Connect);
    assert!(error.to_string().contains("this build has no TLS"), "{error}");
}

// ===== What is restored =====

/// What cannot be restored stays undone, and the connection works: over HTTP a refusal of one request says nothing of
/// the others.
#[expect(deprecated, reason = "servers up to 2025-11-25 have a level")]
#[tokio::test]
async fn what_a_server_refuses_to_restore_by_whatever_status_costs_no_call_its_connection() {
    use rmcp::model::{LoggingLevel, SetLevelRequestParams};

    let refusals = [
        Reply::http("500 Internal Server Error", &[], "gone"),
        Reply::http("400 Bad Request", &[], ""),
        Reply::http("401 Unauthorized", &[], ""),
        Reply::http("403 Forbidden", &[], ""),
        Reply::http("429 Too Many Requests", &[("Retry-After", "60")], ""),
        Reply::http("307 Temporary Redirect", &[("Location", "/elsewhere")], ""),
        Reply::http("202 Accepted", &[], ""),
        Reply::http("200 OK", &[], "hello"),
        Reply::json("{"),
        Reply::json(r#"{"jsonrpc":"2.0","id":4711,"result":{}}"#),
        Reply::error(-32602, "no such resource"),
        Reply::sse().end_of_chunks(),
        Reply::new().close(),
    ];
    for (nth, refusal) in refusals.into_iter().enumerate() {
        let server = Server::start().await;
        let client = builder(http(&server)).deadline(ms(3_000)).build().unwrap();
        for method in ["resources/subscribe", "resources/unsubscribe", "logging/setLevel"] {
            server.always(On::Method(method), Reply::result(&json!({})));
        }
        client.subscribe(SubscribeRequestParams::new("file:///a")).await.unwrap();
        client.set_level(SetLevelRequestParams::new(LoggingLevel::Info)).await.unwrap();
        server.heal();
        server.forget_sessions();
        for method in ["resources/subscribe", "resources/unsubscribe", "logging/setLevel"] {
            server.always(On::Method(method), refusal.clone());
        }
        for again in 0..2 {
            let read = bounded("restored", client.send(lines())).await;
            assert_eq!(word(&read), "ok", "{nth}, {again}: {read:?}");
        }
        let asked = |method| server.requests(method).len();
        assert_eq!((asked("resources/subscribe"), asked("logging/setLevel"), server.sessions()), (2, 2, 2));

        // Whatever the server says to it, on the next connection it is not restored.
        let _ = client.unsubscribe(UnsubscribeRequestParams::new("file:///a")).await;
        server.forget_sessions();
        let read = bounded("restored again", client.send(lines())).await;
        assert_eq!(word(&read), "ok", "{nth}: {read:?}");
        let sessions = server.sessions();
        assert_eq!((asked("resources/subscribe"), asked("logging/setLevel"), sessions), (2, 3, 3), "{nth}");
    }
}

#[tokio::test]
async fn a_session_that_is_lost_while_it_is_restored_is_a_failed_connect_and_the_next_one_works() {
    let server = Server::start().await;
    let client = builder(http(&server)).deadline(ms(3_000)).build().unwrap();
    server.always(On::Method("resources/subscribe"), Reply::result(&json!({})));
    client.subscribe(SubscribeRequestParams::new("file:///a")).await.unwrap();
    server.heal();
    server.forget_sessions();
    server.on(On::Method("resources/subscribe"), Reply::http("404 Not Found", &[], ""));
    let write = bounded("restored", client.send(append("x"))).await;
    assert!(matches!(write.unwrap_err().cause(), Cause::Evidence(Evidence::SessionUnknown)));
    assert_eq!(word(&bounded("restored", client.send(lines())).await), "ok");
    assert_eq!((server.sessions(), server.effects().len()), (3, 0));
}

// ===== What cannot be read =====

/// The server did the write and says so, with content of a kind that the SDK does not know. Whoever called is not
/// told that the server had an error of its own, as if nothing were done.
#[tokio::test]
async fn a_result_of_a_kind_that_the_sdk_does_not_know_is_no_error_of_the_server() {
    let server = Server::start().await;
    let client = builder(http(&server)).build().unwrap();
    let result = json!({ "content": [{ "type": "hologram", "data": "x" }], "isError": false });
    for tool in ["append", "lines"] {
        server.on(On::Tool(tool), Reply::result(&result).after_the_effect());
        let arguments = json!({ "line": "x" }).as_object().cloned().unwrap();
        let told = client.call_tool(CallToolRequestParams::new(tool).with_arguments(arguments)).await;
        let error = told.as_ref().unwrap_err();
        assert!(matches!(error.cause(), Cause::AnswerUnread), "{error:?}");
        let is_write = tool == "append";
        assert_eq!((error.outcome(), error.may_have_landed()), (Outcome::Answered, is_write), "{error}");
        let text = format!("{:?}", tool_result(told).content);
        assert!(!text.contains("error of its own") && !text.contains("hologram"), "{text}");
        assert_eq!(text.contains("verify before repeating"), is_write, "{text}");
    }
    assert_eq!((server.effects().len(), server.calls("append").len()), (2, 1));
}

// ===== What counts as sent =====

/// Above what the system's buffers hold.
const LARGE: usize = 12 << 20;

/// An HTTP server that does its work the moment that it has read a request, and answers then. It reads the first
/// large request only up to what one buffer holds, until it is asked what there is: that is answered by what there
/// was when the question came, and is on its way for a while.
#[derive(Default)]
struct Slow {
    effects: Mutex<Vec<usize>>,
    held: AtomicBool,
    go_on: Notify,
    /// How many bytes of the first one had been sent when the question came.
    got: Mutex<usize>,
}

impl Slow {
    async fn start() -> (Arc<Self>, SocketAddr) {
        let socket = TcpSocket::new_v4().unwrap();
        socket.set_recv_buffer_size(4096).unwrap();
        socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let listener = socket.listen(64).unwrap();
        let (server, address) = (Arc::new(Self::default()), listener.local_addr().unwrap());
        let shared = Arc::clone(&server);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(Arc::clone(&shared).serve(stream));
            }
        });
        (server, address)
    }

    async fn serve(self: Arc<Self>, mut stream: TcpStream) -> Option<()> {
        let (mut input, mut buffer) = (Vec::new(), vec![0; 64 << 10]);
        let head = loop {
            if let Some(at) = input.windows(4).position(|four| four == b"\r\n\r\n") {
                break at + 4;
            }
            match stream.read(&mut buffer).await.ok()? {
                0 => return None,
                read => input.extend_from_slice(&buffer[..read]),
            }
        };
        let text = String::from_utf8_lossy(&input[..head]).to_ascii_lowercase();
        if text.starts_with("get") {
            return reply(&mut stream, "405 Method Not Allowed", "").await;
        }
        let length = text.split("content-length:").nth(1).and_then(|rest| rest.lines().next());
        let length: usize = length.and_then(|length| length.trim().parse().ok())?;
        if length > 1 << 20 && !self.held.swap(true, Ordering::SeqCst) {
            *self.got.lock().unwrap() = input.len() - head;
            self.go_on.notified().await;
        }
        while input.len() < head + length {
            match stream.read(&mut buffer).await.ok()? {
                0 => return None,
                read => input.extend_from_slice(&buffer[..read]),
            }
        }
        let message: Value = serde_json::from_slice(&input[head..]).ok()?;
        let result = match (message["method"].as_str()?, message["params"]["name"].as_str()) {
            ("initialize", _) => json!({
                "protocolVersion": "2025-06-18", "capabilities": { "tools": {} },
                "serverInfo": { "name": "slow", "version": "1" },
            }),
            (_, Some("append")) => {
                let line = message["params"]["arguments"]["line"].as_str()?;
                self.effects.lock().unwrap().push(line.len());
                json!({ "content": [] })
            }
            (_, Some(_)) => {
                let there = self.effects.lock().unwrap().len();
                let seen: Vec<_> = (0..there).map(|_| "x".repeat(LARGE)).collect();
                self.go_on.notify_one();
                // The answer takes its time on the way.
                sleep(ms(500)).await;
                json!({ "content": [], "structuredContent": { "result": seen } })
            }
            ("ping", _) => json!({}),
            _ => return reply(&mut stream, "202 Accepted", "").await,
        };
        let answer = json!({ "jsonrpc": "2.0", "id": message["id"], "result": result }).to_string();
        reply(&mut stream, "200 OK", &answer).await
    }
}

async fn reply(stream: &mut TcpStream, status: &str, body: &str) -> Option<()> {
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).await.ok()?;
    stream.write_all(body.as_bytes()).await.ok()?;
    stream.flush().await.ok()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_quarantine_does_not_count_while_a_body_lies_in_the_http_clients_buffer() {
    let (server, address) = Slow::start().await;
    let connector = Connector::http((), format!("http://{address}/mcp"));
    let safety = WriteSafetyLayer::new(check_without_a_word).attempt_timeout(ms(4_000)).quarantine(ms(6_000));
    let client = builder(connector).deadline(BOUND).writes(safety).build().unwrap();
    let write = timeout(BOUND, client.send(append(&"x".repeat(LARGE)))).await.unwrap();
    sleep(ms(500)).await;
    let effects = server.effects.lock().unwrap().len();
    let got = *server.got.lock().unwrap();
    assert!(got < LARGE / 2, "the request was with the server already: {got}");
    assert!(effects < 2, "it landed {effects} times, and the caller is told {}", word(&write));
}

/// What of the client's buffers is not seen counts as not sent yet, until the server has taken the request up.
#[tokio::test]
async fn a_quarantine_counts_from_where_the_last_byte_is_known_to_have_been_sent() {
    let stalled = || Reply::new().stall();
    let cut = || Reply::sse().close();
    let refused = || status("503 Service Unavailable", &[], "");
    for (own, answer, reply, replayed) in [
        (true, "none", stalled(), true),
        (true, "a stream that is cut", cut(), true),
        (true, "a refusal", refused(), true),
        (false, "none", stalled(), false),
        (false, "a stream that is cut", cut(), true),
        (false, "a refusal", refused(), true),
        // It may have come before the request was read to its end.
        (false, "a refusal of a large one", refused(), false),
        (true, "a refusal of a large one", refused(), true),
    ] {
        let server = Server::start().await;
        let client = reqwest::Client::builder().resolve("server.test", server.address()).build().unwrap();
        let connector = match own {
            true => http(&server),
            // There may be a proxy to it, which is spoken to over TLS.
            false => {
                let url = format!("http://server.test:{}/mcp", server.address().port());
                Connector::http((), Http::new(url).client(client))
            }
        };
        let safety = WriteSafetyLayer::new(check_without_a_word).attempt_timeout(ms(300)).quarantine(ms(200));
        let client = builder(connector).deadline(ms(2_000)).writes(safety).build().unwrap();
        assert_eq!(word(&client.send(lines()).await), "ok");
        server.on(On::Tool("append"), reply);
        let line = "x".repeat(if answer.contains("large") { 20_000 } else { 1 });
        let write = bounded(answer, client.send(append(&line))).await;
        let expected = if replayed { ("ok", 2) } else { ("unknown", 1) };
        let calls = server.calls("append").len();
        assert_eq!((word(&write), calls), expected, "own: {own}, answer: {answer}: {write:?}");
    }
}

/// At the address that the URL names there is no proxy in between, whosever client it is.
#[tokio::test]
async fn a_client_of_the_users_that_is_seen_to_speak_plainly_is_known_like_our_own() {
    let server = Server::start().await;
    let connector = Connector::http((), Http::new(server.url()).client(reqwest::Client::new()));
    let safety = WriteSafetyLayer::new(check_without_a_word).attempt_timeout(ms(300)).quarantine(ms(200));
    let client = builder(connector).deadline(ms(2_000)).writes(safety).build().unwrap();
    assert_eq!(word(&client.send(lines()).await), "ok");
    server.on(On::Tool("append"), Reply::new().stall());
    let write = bounded("replayed", client.send(append("x"))).await;
    assert_eq!((word(&write), server.calls("append").len()), ("ok", 2), "{write:?}");
}

// ===== What waits for its turn =====

#[tokio::test]
async fn a_call_whose_annotation_is_taken_back_while_it_waits_for_its_turn_is_not_sent() {
    let server = Server::start().await;
    let tools = |reads: bool| {
        let tool = |name, reads: bool| json!({ "name": name, "inputSchema": { "type": "object" }, "annotations": { "readOnlyHint": reads } });
        Reply::result(&json!({ "tools": [tool("lines", true), tool("append", reads)] }))
    };
    let (changed, hold) = (Gate::new(), Gate::new());
    let word_of_it = r#"{"jsonrpc":"2.0","method":"notifications/tools/list_changed"}"#;
    server.on(On::Get, Reply::sse().gate(&changed).chunk(format!("data: {word_of_it}\n\n")).stall());
    server.on(On::Method("tools/list"), tools(true));
    let config = StreamableHttpClientTransportConfig::with_uri(server.url()).max_concurrent_requests(1);
    let connector = Connector::http((), config).tools(ToolRules::new().trust_annotations());
    let client = Arc::new(Stack::builder(connector).deadline(BOUND).build().unwrap());
    connected(&server, &client).await;

    // One call holds up the other.
    server.on(
        On::Tool("lines"),
        Reply::new().gate(&hold).then_http(
            "200 OK",
            &[JSON],
            format!(r#"{{"jsonrpc":"2.0","id":$ID,"result":{}}}"#, appended()),
        ),
    );
    server.always(On::Method("tools/list"), tools(false));
    let first = spawn(&client, lines());
    server.until_called("lines", 2).await;
    let second = spawn(&client, append("x"));
    sleep(ms(200)).await;
    changed.open(1);
    sleep(ms(300)).await;
    hold.open(1);
    assert_eq!(word(&bounded("held", first).await.unwrap()), "ok");
    let error = bounded("refused", second).await.unwrap().unwrap_err();
    assert!(matches!(error.cause(), Cause::Refused(Refusal::EffectChanged)), "{error:?}");
    assert_eq!((error.outcome(), server.calls("append").len()), (Outcome::NotDone, 0));

    // Judged anew it is a write, and goes out.
    assert_eq!(word(&client.send(append("y")).await), "ok");
    assert_eq!(server.effects(), ["y"]);
}

/// Events with an answer to each of the first requests.
fn guesses() -> String {
    let guess = |id| format!("data: {{\"jsonrpc\":\"2.0\",\"id\":{id},\"result\":{}}}\n\n", appended());
    (0..8).map(guess).collect()
}

/// Resolves every name as that address, as long as nobody holds the way.
struct Names(SocketAddr, Arc<RwLock<()>>);

impl reqwest::dns::Resolve for Names {
    fn resolve(&self, _: reqwest::dns::Name) -> reqwest::dns::Resolving {
        let (address, way) = (self.0, Arc::clone(&self.1));
        Box::pin(async move {
            let _ = way.read().await;
            Ok(Box::new(std::iter::once(address)) as reqwest::dns::Addrs)
        })
    }
}

#[tokio::test]
async fn what_the_stray_stream_says_of_a_write_that_waits_for_its_connection_does_not_cost_it_its_answer() {
    let server = Server::start().await;
    let (early, way) = (Gate::new(), Arc::<RwLock<()>>::default());
    server.on(On::Get, Reply::sse().gate(&early).chunk(guesses()).stall());
    let names = Names(server.address(), Arc::clone(&way));
    let own = reqwest::Client::builder().dns_resolver(names).pool_max_idle_per_host(0).build().unwrap();
    let url = format!("http://server.test:{}/mcp", server.address().port());
    let connector = Connector::http((), Http::new(url).client(own));
    let client = Arc::new(builder(connector).deadline(BOUND).build().unwrap());
    connected(&server, &client).await;

    let held = way.write().await;
    let write = spawn(&client, append("x").within(ms(5_000)));
    sleep(ms(200)).await;
    early.open(1);
    sleep(ms(200)).await;
    assert_eq!(server.calls("append").len(), 0);
    drop(held);
    assert_eq!(word(&bounded("done", write).await.unwrap()), "ok");
    assert_eq!(server.effects(), ["x"]);
}

#[tokio::test]
async fn what_the_stray_stream_says_of_a_write_that_waits_for_its_turn_is_no_answer_to_it() {
    let server = Server::start().await;
    let (early, hold) = (Gate::new(), Gate::new());
    server.on(On::Get, Reply::sse().gate(&early).chunk(guesses()).stall());
    let config = StreamableHttpClientTransportConfig::with_uri(server.url()).max_concurrent_requests(1);
    let client = Arc::new(builder(Connector::http((), config)).deadline(BOUND).build().unwrap());
    connected(&server, &client).await;

    // One write holds up the others.
    let answer = format!(r#"{{"jsonrpc":"2.0","id":$ID,"result":{}}}"#, appended());
    server.on(On::Tool("append"), Reply::new().gate(&hold).then_http("200 OK", &[JSON], answer));
    let _first = spawn(&client, append("x"));
    server.until_called("append", 1).await;
    let expires = spawn(&client, append("y").within(ms(600)));
    let goes = spawn(&client, append("z"));
    sleep(ms(200)).await;
    early.open(1);
    let error = bounded("expired", expires).await.unwrap().unwrap_err();
    assert_eq!((error.outcome(), error.delivery()), (Outcome::NotDone, Delivery::NotSent));
    hold.open(1);
    assert_eq!(word(&bounded("done", goes).await.unwrap()), "ok");
    assert_eq!(server.effects().last().map(String::as_str), Some("z"));
    assert_eq!(server.calls("append").len(), 2);
}

// ===== What is never said =====

#[tokio::test]
async fn no_session_argument_or_answer_is_in_an_error_or_an_event() {
    let server = Server::start().await;
    let events = Events::default();
    let client = builder(http(&server)).on_event(events.sink()).build().unwrap();
    connected(&server, &client).await;
    let secret = "5ecret";
    let mut texts = String::new();
    for reply in [
        status("502 Bad Gateway", &[HTML, ("X-5ecret", secret)], secret),
        Reply::json(secret),
        Reply::json(null(-32603, secret)),
        status("400 Bad Request", &[JSON], &null(-32000, secret)),
        status("302 Found", &[("Location", "http://5ecret.example/")], secret),
        status("200 OK", &[("Content-Type", "text/5ecret")], secret),
        Reply::sse().chunk(format!("data: {secret}\n\n")).end_of_chunks(),
        status("404 Not Found", &[], secret).forgets(),
    ] {
        server.on(On::Tool("append"), reply);
        let error: CallError = client.send(append(secret)).await.unwrap_err();
        let mut source = std::error::Error::source(&error);
        texts += &format!("{error}\n{error:?}\n");
        while let Some(inner) = source {
            texts += &format!("{inner}\n{inner:?}\n");
            source = inner.source();
        }
    }
    texts += &serde_json::to_string(&events.all()).unwrap();
    assert!(!texts.contains(secret), "{texts}");
    assert!(!texts.contains("\"s1\"") && !texts.contains(" s1"), "{texts}");
}

// ===== The handshake, and the other stream =====

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handshake_that_meets_a_fault_costs_a_call_no_longer_than_it_has_and_the_next_connects() {
    let error = r#"{"jsonrpc":"2.0","id":$ID,"error":{"code":-32603,"message":"not now"}}"#;
    let faults = [
        ("closed", Reply::new().close()),
        ("reset", Reply::new().reset()),
        ("nothing", Reply::new().stall()),
        ("202", status("202 Accepted", &[], "")),
        ("204", status("204 No Content", &[], "")),
        ("500 text/html", status("500 Internal Server Error", &[HTML], PAGE)),
        ("404 text/html", status("404 Not Found", &[HTML], PAGE)),
        ("400, id null", no_valid_session()),
        ("401", status("401 Unauthorized", &[("WWW-Authenticate", "Bearer")], "")),
        ("429", status("429 Too Many Requests", &[("Retry-After", "0")], "")),
        ("302", status("302 Found", &[("Location", "/mcp")], "")),
        ("200 text/html", status("200 OK", &[HTML], PAGE)),
        ("200, an error, id null", Reply::json(null(-32603, "no"))),
        ("200, an error with our id", Reply::json(error)),
        ("200 {}", Reply::json("{}")),
        ("SSE, a comment, the end", Reply::sse().chunk(": hi\n\n").end_of_chunks()),
        ("SSE, primed, the end", primed("e1")),
        ("SSE, nothing", Reply::sse().stall()),
    ];
    let mut flights = JoinSet::new();
    for (fault, reply) in faults {
        for method in ["initialize", "notifications/initialized"] {
            // To a notification 202 is the answer, and most of the rest is ignored.
            let reply = reply.clone();
            flights.spawn(async move {
                let what = format!("{method}: {fault}");
                let flight = async {
                    let server = Server::start().await;
                    server.always(On::Method(method), reply);
                    let reconnect = ReconnectLayer::once().connect_timeout(ms(2_000));
                    let client = builder(http(&server)).reconnect(reconnect).build().unwrap();
                    for request in [append("x"), lines()] {
                        let begin = Instant::now();
                        let result = client.send(request.within(ms(700))).await;
                        assert!(begin.elapsed() < ms(2_500), "{what}: {:?}", begin.elapsed());
                        if method == "initialize" {
                            assert_eq!(word(&result), "not done", "{what}: {result:?}");
                            assert!(server.calls("append").is_empty(), "{what}");
                        }
                    }
                    server.heal();
                    // A connect that is under way still fails those that wait for it.
                    let mut next = client.send(append("y")).await;
                    if word(&next) == "not done" {
                        next = client.send(append("y")).await;
                    }
                    assert_eq!(word(&next), "ok", "{what}: {next:?}");
                    let effects = server.effects();
                    assert_eq!(effects.iter().filter(|line| *line == "y").count(), 1, "{what}");
                    assert!(effects.iter().filter(|line| *line == "x").count() <= 1, "{what}");
                };
                bounded(&what, flight).await;
            });
        }
    }
    flights.join_all().await;
}

#[tokio::test]
async fn the_standalone_stream_may_do_what_it_likes() {
    let log = r#"{"jsonrpc":"2.0","method":"notifications/message","params":{"level":"info","data":1}}"#;
    let streams = [
        ("ends at once", Reply::sse().end_of_chunks()),
        ("resets at once", Reply::new().reset()),
        ("says nothing", Reply::sse().stall()),
        ("never answers", Reply::new().stall()),
        ("half an event, closed", Reply::sse_until_close().bytes("data: {\"jso").close()),
        ("primed, ends", primed("g1")),
        (
            "an answer to nobody",
            Reply::sse().chunk("data: {\"jsonrpc\":\"2.0\",\"id\":4711,\"result\":{}}\n\n").end_of_chunks(),
        ),
        ("no JSON", Reply::sse().chunk("data: {]\n\n").end_of_chunks()),
        ("a notification, ends", Reply::sse().chunk(format!("data: {log}\n\n")).end_of_chunks()),
        ("500", status("500 Internal Server Error", &[HTML], PAGE)),
        ("401", status("401 Unauthorized", &[("WWW-Authenticate", "Bearer")], "")),
        ("400, No valid session ID", no_valid_session()),
        ("200 text/html", status("200 OK", &[HTML], PAGE)),
        ("202", status("202 Accepted", &[], "")),
    ];
    for (stream, reply) in streams {
        let server = Server::start().await;
        server.always(On::Get, reply);
        let client = builder(http(&server)).build().unwrap();
        bounded(stream, connected(&server, &client)).await;
        for _ in 0..4 {
            let (read, write) = (client.send(lines()).await, client.send(append("x")).await);
            assert_eq!((word(&read), word(&write)), ("ok", "ok"), "{stream}: {read:?} {write:?}");
            sleep(ms(50)).await;
        }
        assert_eq!((server.sessions(), client.generation()), (1, Some(1)), "{stream}");
        let gets = server.seen().iter().filter(|seen| seen.verb == "GET").count();
        // The primed one asks for a repetition after 10 ms.
        let at_most = if stream.starts_with("primed") { 100 } else { 3 };
        assert!(gets <= at_most, "{stream}: asked for {gets} times within half a second");
    }
}

#[tokio::test]
async fn what_the_server_asks_amid_an_answer_is_answered() {
    for era in [Era::Sessions, Era::NoSessions] {
        let server = Server::of(era).await;
        let client = Arc::new(builder(http(&server)).build().unwrap());
        assert_eq!(word(&client.send(lines()).await), "ok");
        let gate = Gate::new();
        let reply = Reply::sse()
            .chunk("data: {\"jsonrpc\":\"2.0\",\"id\":\"of-the-server\",\"method\":\"ping\"}\n\n")
            .gate(&gate)
            .executes()
            .chunk(format!("data: {{\"jsonrpc\":\"2.0\",\"id\":$ID,\"result\":{}}}\n\n", appended()))
            .end_of_chunks();
        server.on(On::Tool("append"), reply);
        let write = spawn(&client, append("x"));
        server
            .until(|seen| {
                seen.iter().any(|seen| seen.id() == "of-the-server" && seen.message["result"].is_object())
            })
            .await;
        gate.open(1);
        let write = bounded("asked", write).await.unwrap();
        assert_eq!(word(&write), "ok", "{write:?}");
        assert_eq!((server.effects().len(), server.calls("append").len()), (1, 1));
    }
}

// ===== Connections that are kept =====

#[tokio::test]
async fn a_kept_connection_that_the_server_closes_meanwhile_never_makes_two_of_one() {
    let server = Server::start().await;
    let kept = reqwest::Client::builder()
        .redirect(reqwest::redirect::Policy::none())
        .pool_max_idle_per_host(4)
        .build()
        .unwrap();
    let events = Events::default();
    let http = Http::new(server.url()).client(kept);
    let client = builder(Connector::http((), http)).on_event(events.sink()).build().unwrap();
    connected(&server, &client).await;
    let body = format!(r#"{{"jsonrpc":"2.0","id":$ID,"result":{}}}"#, appended());
    let (mut ok, mut unknown) = (0, 0);
    for nth in 0..150_u64 {
        // It closes just when the next request may be on its way.
        let closing = Reply::new()
            .executes()
            .then_http("200 OK", &[JSON], body.as_str())
            .wait(Duration::from_micros(nth * 37 % 1_500));
        server.on(On::Tool("append"), if nth % 2 == 0 { closing.close() } else { closing.reset() });
        let line = nth.to_string();
        let write = bounded("kept", client.send(append(&line))).await;
        let landed = server.effects().iter().filter(|effect| **effect == line).count();
        match word(&write) {
            "ok" => {
                ok += 1;
                assert_eq!(landed, 1, "{nth}");
            }
            "unknown" => {
                unknown += 1;
                assert!(landed <= 1, "{nth}");
            }
            "not done" => assert_eq!(landed, 0, "{nth}: {write:?}"),
            other => panic!("{nth}: {other}: {write:?}"),
        }
        // Whatever came of it, its script is used up.
        server.heal();
        sleep(Duration::from_micros(nth * 53 % 1_700)).await;
    }
    assert!(ok >= 75, "{ok} ok, {unknown} unknown");
    assert_eq!(events.of("in_doubt").len(), unknown);
    assert_eq!((server.sessions(), client.generation()), (1, Some(1)));
}

#[tokio::test]
async fn notifications_are_sent_once_and_never_again() {
    let server = Server::start().await;
    let client = builder(http(&server)).build().unwrap();
    connected(&server, &client).await;
    let notification = || {
        rmcp::model::ClientNotification::RootsListChangedNotification(
            rmcp::model::RootsListChangedNotification::default(),
        )
    };
    let method = "notifications/roots/list_changed";
    // A server that takes it, one that is lost with it, one that refuses it, and one that has forgotten the session.
    bounded("a notification", client.notify(notification())).await.unwrap();
    for reply in [Reply::new().reset(), status("502 Bad Gateway", &[HTML], PAGE)] {
        server.on(On::Method(method), reply);
        let failed = bounded("a notification", client.notify(notification())).await.unwrap_err();
        assert_eq!(failed.outcome(), Outcome::Unknown, "{failed:?}");
    }
    server.forget_sessions();
    let failed = bounded("a notification", client.notify(notification())).await.unwrap_err();
    assert_eq!(failed.outcome(), Outcome::Unknown, "{failed:?}");
    sleep(ms(100)).await;
    let sent = server.requests(method);
    assert_eq!(sent.len(), 4);
    assert!(sent.iter().all(|seen| seen.session.as_deref() == Some("s1")));
    assert_eq!(word(&client.send(append("x")).await), "ok");
    assert_eq!(server.requests(method).len(), 4, "not on the next session");
}

// ===== A transport of the caller's own that makes sessions anew by itself =====

/// The SDK's transport as it is by default: after a 404 it begins another session, and sends requests again.
fn replaying(server: &Server, recovery: Duration) -> Connector {
    let url = server.url();
    Connector::new((), move || {
        let mut config = StreamableHttpClientTransportConfig::with_uri(url.as_str());
        config.session_recovery_timeout = recovery;
        Ok(StreamableHttpClientTransport::with_client(reqwest::Client::new(), config))
    })
}

#[tokio::test]
async fn a_write_whose_session_the_sdk_made_anew_is_unknown_and_no_error_of_the_server() {
    for accepted in [status("202 Accepted", &[], ""), Reply::sse().stall()] {
        let server = Server::start().await;
        let events = Events::default();
        let stack = builder(replaying(&server, BOUND)).deadline(BOUND).on_event(events.sink());
        let client = Arc::new(stack.build().unwrap());
        connected(&server, &client).await;
        server.on(On::Tool("append"), accepted.after_the_effect());
        let write = spawn(&client, append("x"));
        server.until_called("append", 1).await;
        server.forget_sessions();
        let before = server.seen().len() - 1;
        assert_eq!(word(&bounded("a read", client.send(lines())).await), "ok");

        let write = bounded("the write", write).await.unwrap();
        assert_eq!(word(&write), "unknown", "{write:?}");
        let error = write.unwrap_err();
        assert_eq!((error.delivery(), error.scope()), (Delivery::Ambiguous, Scope::Call), "{error:?}");
        // In the SDK's words, which are those of a server: if they become others, this is where it shows.
        let Some(ServiceError::McpError(said)) = error.get_ref::<ServiceError>() else { panic!("{error:?}") };
        assert_eq!(said.code, rmcp::model::ErrorCode::INTERNAL_ERROR);
        assert!(error.answer().is_none());
        assert_eq!(calls(&server.seen()[before..]), ["append s1", "lines s1", "lines s2"]);
        assert_eq!((server.effects(), server.sessions()), (vec!["x".to_owned()], 2));
        assert_eq!((events.of("in_doubt").len(), client.generation()), (1, Some(1)));

        // A server's own internal error is its answer.
        server.on(On::Tool("append"), Reply::error(-32603, "Internal error"));
        let answered = client.send(append("y")).await;
        assert_eq!(word(&answered), "error", "{answered:?}");
        assert_eq!(answered.unwrap_err().answer().unwrap().code, -32603);
    }
}

#[tokio::test]
async fn a_write_that_the_sdk_gave_up_to_make_its_session_anew_is_unknown() {
    let server = Server::start().await;
    let events = Events::default();
    let stack = builder(replaying(&server, ms(200))).deadline(BOUND).on_event(events.sink());
    let client = Arc::new(stack.build().unwrap());
    connected(&server, &client).await;
    server.on(On::Tool("append"), Reply::new().executes().stall());
    let write = spawn(&client, append("x"));
    server.until_called("append", 1).await;
    server.forget_sessions();
    assert_eq!(word(&bounded("a read", client.send(lines())).await), "ok");

    let write = bounded("the write", write).await.unwrap();
    assert_eq!(word(&write), "unknown", "{write:?}");
    let error = write.unwrap_err();
    assert_eq!((error.delivery(), error.scope()), (Delivery::Ambiguous, Scope::Call), "{error:?}");
    assert_eq!(error.get_ref::<HttpError>().unwrap().kind(), HttpErrorKind::NoResponse);
    let own = error.downcast::<HttpError>().unwrap().into_service_error();
    let Some(ServiceError::TransportSend(own)) = own else { panic!("{own:?}") };
    let mut own: Option<&dyn std::error::Error> = Some(&*own.error);
    let given_up = loop {
        let Some(error) = own else { break false };
        if let Some(error) = error.downcast_ref::<StreamableHttpError<reqwest::Error>>() {
            break matches!(error, StreamableHttpError::SessionRecoveryTimeout);
        }
        own = error.source();
    };
    assert!(given_up, "it was something else");
    assert_eq!((server.effects(), server.sessions()), (vec!["x".to_owned()], 2));
    assert_eq!((server.calls("append").len(), events.of("in_doubt").len()), (1, 1));
    assert_eq!(client.generation(), Some(1));
}
