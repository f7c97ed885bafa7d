//! The stack around the official SDK's client: over child processes of a few lines of shell that send exact bytes,
//! and over a transport of the user's. Streamable HTTP has tests of its own.
#![cfg(all(unix, feature = "rmcp"))]

use std::{
    collections::VecDeque,
    path::PathBuf,
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, ready},
    time::{Duration, Instant},
};

use goaround::{
    Basis, BoxError, Call, CallError, Cause, Deadline, Delivery, Effect, InDoubt, Outcome, Refusal, Scope,
    Stack, Verdict, WriteSafetyLayer,
    mcp::{ToolRules, checks},
    sdk::{self, Client, Connector, InitializeError, Request},
    write_safety::{
        KeyedWrites,
        ledger::{EntryId, Ledger},
    },
};
use rmcp::{
    ClientHandler, RoleClient, ServiceError,
    model::*,
    service::ClientLifecycleMode,
    transport::{StreamableHttpClientTransport, streamable_http_client::StreamableHttpClientTransportConfig},
};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    process::Command,
    sync::Notify,
};
use tower::{Service, ServiceExt};

/// Answers by the method, and a tool by its name. What it is asked goes into `$log`, a line for each message.
const SERVER: &str = r#"
answer() { printf '{"jsonrpc":"2.0","id":%s,"result":%s}\n' "$id" "$1"; }
refuse() { printf '{"jsonrpc":"2.0","id":%s,"error":{"code":%s,"message":"no"}}\n' "$id" "$1"; }
result() { answer '{"content":[{"type":"text","text":"'"$1"'"}]}'; }
initialize() { answer '{"protocolVersion":"2025-06-18","capabilities":{"tools":{},"resources":{}},"serverInfo":{"name":"sh","version":"1"}}'; }
discover() { refuse -32601; }
tools() { answer '{"tools":[]}'; }
say() { echo "$1" >>"$log"; }
say start
# Only the first process does what its tools are told.
first=; [ -e "$log.once" ] || { first=first; : >"$log.once"; }
eval "$before"
while read -r line; do
    method=${line#*'"method":"'}; method=${method%%'"'*}
    name=${line##*'"name":"'}; name=${name%%'"'*}
    case $method in tools/call) say "$name" ;; *) say "$method" ;; esac
    case $line in *'"id":'*) ;; *) continue ;; esac
    id=${line#*'"id":'}; id=${id%%,*}; id=${id%%\}*}
    case $method in
        initialize) initialize ;;
        server/discover) discover ;;
        tools/list) tools ;;
        tools/call) if [ -n "$first" ] || [ -n "$always" ]; then eval "$name"; else result "again $name"; fi ;;
        ping) [ -n "$deaf" ] || answer '{}' ;;
        *) answer '{}' ;;
    esac
done
eval "$after"
"#;

const READS: [&str; 11] =
    ["die", "half", "ok", "shut", "last", "noise", "text_id", "twice", "leave", "hang", "odd"];

/// What the tools do, for a read (`die`) and for a write (`w_die`).
const TOOLS: &str = r#"
die() { kill -KILL $$; }
half() { printf '{"jsonrpc":"2.0","id":%s,"res' "$id"; exit 0; }
ok() { result ok; }
shut() { exec >&-; while :; do sleep 1000; done; }
last() { result last; exit 0; }
noise() { echo garbage; echo '{"jsonrpc":"2.0"}'; echo; result noise; }
text_id() { id=\"$id\"; result text_id; }
twice() { result twice; result twice; }
leave() { sleep 1000 & exit 0; }
hang() { :; }
odd() { printf '{"jsonrpc":"2.0","id":%s,"result":1,"error":{"code":1,"message":"x"}}\n' "$id"; }
null_id() { id=null; refuse -32000; }
w_die() { die; }
w_half() { half; }
w_shut() { shut; }
w_last() { last; }
w_ok() { ok; }
w_hang() { :; }
"#;

struct Lab {
    dir: tempfile::TempDir,
    reports: Arc<Mutex<Vec<serde_json::Value>>>,
}

impl Lab {
    fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap(), reports: Arc::default() }
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("log")
    }

    fn command(&self, before: &str) -> Command {
        let mut command = Command::new("sh");
        let before = format!("{TOOLS}\n{before}");
        command.arg("-c").arg(SERVER).env("before", before).env("log", self.path());
        command
    }

    fn connector(&self, before: &str) -> Connector {
        Connector::stdio((), self.command(before)).tools(ToolRules::new().read_only(READS))
    }

    fn client(&self, before: &str) -> Client {
        self.stack(self.connector(before))
    }

    fn stack(&self, connector: Connector) -> Client {
        let reports = self.reports.clone();
        Stack::builder(connector)
            .deadline(PATIENCE)
            .on_event(move |event| reports.lock().unwrap().push(serde_json::to_value(event).unwrap()))
            .build()
            .unwrap()
    }

    /// What the server was asked, without the handshakes.
    fn asked(&self) -> Vec<String> {
        let log = std::fs::read_to_string(self.path()).unwrap_or_default();
        let known = ["start", "initialize", "notifications/initialized", "ping"];
        log.lines().filter(|line| !known.contains(line)).map(str::to_owned).collect()
    }

    fn count(&self, what: &str) -> usize {
        let log = std::fs::read_to_string(self.path()).unwrap_or_default();
        log.lines().filter(|line| *line == what).count()
    }

    /// Waits until the server was asked that.
    async fn until_asked(&self, what: &str) {
        until(|| self.count(what) > 0).await;
    }

    fn events(&self, kind: &str) -> Vec<serde_json::Value> {
        self.reports.lock().unwrap().iter().filter(|event| event["event"] == kind).cloned().collect()
    }
}

const SECOND: Duration = Duration::from_secs(1);
/// Longer than any machine is busy.
const PATIENCE: Duration = Duration::from_secs(60);
/// Shorter than what would be waited for if something went wrong, longer than a machine is busy.
const SOON: Duration = Duration::from_secs(20);

async fn until(mut holds: impl FnMut() -> bool) {
    let polling = async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(PATIENCE, polling).await.expect("it comes to hold");
}

fn tool(name: &'static str) -> CallToolRequestParams {
    CallToolRequestParams::new(name)
}

fn text(result: &CallToolResult) -> &str {
    &result.content[0].as_text().unwrap().text
}

async fn call(client: &Client, name: &'static str) -> Result<String, CallError> {
    let result = client.call_tool(tool(name)).await?;
    Ok(text(&result).to_owned())
}

#[tokio::test]
async fn a_server_is_called_by_the_sdks_own_types_and_closes_with_the_stack() {
    let lab = Lab::new();
    let client =
        lab.client(r#"tools() { answer '{"tools":[{"name":"ok","inputSchema":{"type":"object"}}]}'; }"#);
    assert!(client.peer().is_none() && client.server_info().is_none());
    assert_eq!(call(&client, "ok").await.unwrap(), "ok");
    assert_eq!(client.list_all_tools().await.unwrap()[0].name, "ok");
    client.ping().await.unwrap();
    assert_eq!(client.server_info().unwrap().server_info.as_ref().unwrap().name, "sh");
    client.notify(RootsListChangedNotification::default()).await.unwrap();
    lab.until_asked("notifications/roots/list_changed").await;
    // By the SDK's own handle too, which is that of this connection.
    let peer = client.peer().unwrap();
    assert_eq!(text(&peer.call_tool(tool("ok")).await.unwrap()), "ok");
    assert_eq!(client.shutdown(PATIENCE).await, 0);
    let refused = client.notify(RootsListChangedNotification::default()).await.unwrap_err();
    assert_eq!(refused.outcome(), Outcome::NotDone);
    assert!(peer.call_tool(tool("ok")).await.is_err());
    assert_eq!(lab.asked(), ["ok", "tools/list", "notifications/roots/list_changed", "ok"]);
}

#[tokio::test]
async fn a_child_that_ends_in_any_way_is_a_closure_at_once_and_a_read_is_answered_by_the_next() {
    for name in ["die", "half", "shut", "leave"] {
        let lab = Lab::new();
        let client = lab.client("");
        let start = Instant::now();
        assert_eq!(call(&client, name).await.unwrap(), format!("again {name}"));
        assert!(start.elapsed() < SOON, "{name}: {:?}", start.elapsed());
        assert_eq!(lab.asked(), [name, name]);
        let incident = &lab.events("incident")[0];
        assert_eq!(incident["process_restarted"], true, "{name}: {incident}");
        assert_eq!(incident["before"]["server"]["name"], "sh", "{name}: {incident}");
        assert_eq!(incident["after"]["protocol"], "2025-06-18", "{name}: {incident}");
        assert_eq!(lab.events("recovery").len(), 1, "{name}");
        client.shutdown(PATIENCE).await;
    }
}

#[tokio::test]
async fn a_write_that_a_child_takes_along_is_unknown_and_never_sent_again() {
    for name in ["w_die", "w_half", "w_shut"] {
        let lab = Lab::new();
        let client = lab.client("");
        let error = call(&client, name).await.unwrap_err();
        assert_eq!(error.outcome(), Outcome::Unknown, "{name}: {error}");
        assert_eq!(error.scope(), Scope::Connection, "{name}");
        assert!(matches!(error.cause(), Cause::Closed(_)), "{name}: {error:?}");
        assert!(error.to_string().starts_with("outcome UNKNOWN: tools/call: "), "{error}");
        assert_eq!(call(&client, "ok").await.unwrap(), "again ok");
        assert_eq!(lab.asked(), [name, "ok"]);
        client.shutdown(PATIENCE).await;
    }
}

#[tokio::test]
async fn a_write_to_a_child_that_has_exited_is_not_sent_and_goes_to_the_next() {
    let lab = Lab::new();
    let client = lab.client("");
    assert_eq!(call(&client, "w_last").await.unwrap(), "last");
    // Whether the exit has been seen by now or not: no byte of it is lost to a dead process for good.
    until(|| client.peer().is_none_or(|peer| peer.is_transport_closed())).await;
    assert_eq!(call(&client, "w_ok").await.unwrap(), "again w_ok");
    assert_eq!(lab.asked(), ["w_last", "w_ok"]);
    client.shutdown(PATIENCE).await;
}

#[tokio::test]
async fn a_write_whose_process_is_gone_is_checked_and_sent_again_once_it_is_known_not_to_have_landed() {
    let lab = Lab::new();
    let connector = lab.connector("").exit_ends_effects();
    let client: Client = Stack::builder(connector)
        .deadline(PATIENCE)
        .check(|doubt: InDoubt<Request, ServerResult>| async move {
            assert_eq!(doubt.request().tool_name(), Some("w_die"));
            let seen = doubt.probe(tool("ok").into()).await?;
            assert!(matches!(seen, ServerResult::CallToolResult(_)));
            Ok::<Verdict<ServerResult>, BoxError>(doubt.not_landed())
        })
        .build()
        .unwrap();
    assert_eq!(call(&client, "w_die").await.unwrap(), "again w_die");
    assert_eq!(lab.asked(), ["w_die", "ok", "w_die"]);
    client.shutdown(PATIENCE).await;
}

#[tokio::test]
async fn a_ready_made_check_finds_a_write_that_landed() {
    let lab = Lab::new();
    let check = checks::read_back("w_die").by_tool("ok").same("/content/0/text", "/text");
    let client: Client = Stack::builder(lab.connector(""))
        .deadline(PATIENCE)
        .writes(WriteSafetyLayer::new(sdk::check(check.landed_with(|_, seen| seen.clone()))))
        .build()
        .unwrap();
    let write = |text| Request::tool("w_die", json!({ "text": text }));
    let ServerResult::CallToolResult(result) = client.send(write("again ok")).await.unwrap() else {
        panic!()
    };
    assert_eq!(text(&result), "again ok");
    client.shutdown(PATIENCE).await;

    let lab = Lab::new();
    let check = checks::read_back("w_die").by_tool("ok").same("/content/0/text", "/text");
    let writes = WriteSafetyLayer::new(sdk::check(check));
    let client: Client = Stack::builder(lab.connector("")).deadline(PATIENCE).writes(writes).build().unwrap();
    let error = client.send(write("something else")).await.unwrap_err();
    assert_eq!(error.outcome(), Outcome::Unknown);
    assert_eq!(lab.asked(), ["w_die", "ok"]);
    client.shutdown(PATIENCE).await;
}

#[tokio::test]
async fn what_is_no_answer_is_passed_over_and_an_answer_in_another_form_is_taken() {
    let lab = Lab::new();
    let client = lab.client("");
    for name in ["noise", "text_id", "twice", "ok"] {
        assert_eq!(call(&client, name).await.unwrap(), name);
    }
    assert_eq!(client.generation(), Some(1));
    // An answer that cannot be read ends its call at once, and hurts nobody else.
    let error = client.send(Request::from(tool("odd")).as_effect(Effect::Write)).await.unwrap_err();
    assert_eq!((error.outcome(), error.scope()), (Outcome::Unknown, Scope::Call), "{error:?}");
    assert_eq!(call(&client, "ok").await.unwrap(), "ok");
    assert_eq!(client.generation(), Some(1));
    client.shutdown(PATIENCE).await;
}

#[tokio::test]
async fn the_servers_own_error_is_the_answer_unchanged() {
    let lab = Lab::new();
    let client = lab.client("broken() { refuse -32000; }");
    let error = call(&client, "broken").await.unwrap_err();
    assert_eq!((error.outcome(), error.delivery()), (Outcome::Answered, Delivery::Answered));
    let answer = error.answer().unwrap();
    assert_eq!((answer.code, answer.message.as_str()), (-32000, "no"));
    let ServiceError::McpError(error) = ServiceError::from(error) else { panic!() };
    assert_eq!((error.code, &*error.message), (ErrorCode(-32000), "no"));
    client.shutdown(PATIENCE).await;
}

#[tokio::test]
async fn what_is_known_survives_in_the_sdks_error() {
    let lab = Lab::new();
    let client = lab.client("");
    let error = ServiceError::from(call(&client, "w_die").await.unwrap_err());
    let text = error.to_string();
    assert!(text.starts_with("Transport send error: ") && text.contains(" outcome UNKNOWN: "), "{text}");
    let ServiceError::TransportSend(error) = error else { panic!("{error}") };
    let error = error.error.downcast::<CallError>().unwrap();
    assert_eq!(error.outcome(), Outcome::Unknown);
    assert!(error.to_string().starts_with("outcome UNKNOWN: "), "{error}");
    // By the name that event and ledger have for it.
    let call = error.call().unwrap();
    let [doubt] = &lab.events("in_doubt")[..] else { panic!() };
    assert_eq!(doubt["call"], serde_json::to_value(call).unwrap());
    let entries = client.ledger().in_doubt().await.unwrap();
    assert_eq!(entries.iter().map(|entry| entry.id.call()).collect::<Vec<_>>(), [call]);
    client.shutdown(PATIENCE).await;
}

#[tokio::test]
async fn a_dropped_call_and_an_expired_one_are_cancelled_on_their_own_connection_and_on_no_other() {
    let lab = Lab::new();
    let client = lab.client("");
    let dropped = tokio::spawn({
        let client = client.clone();
        async move { call(&client, "hang").await }
    });
    lab.until_asked("hang").await;
    dropped.abort();
    until(|| lab.count("notifications/cancelled") == 1).await;
    let limited = Request::from(tool("w_hang")).within(Duration::from_millis(500));
    let error = client.send(limited).await.unwrap_err();
    assert_eq!(error.outcome(), Outcome::Unknown);
    until(|| lab.count("notifications/cancelled") == 2).await;
    // One whose connection is gone is cancelled nowhere.
    let hanging = tokio::spawn({
        let client = client.clone();
        async move { call(&client, "w_hang").await }
    });
    until(|| lab.count("w_hang") == 2).await;
    assert_eq!(call(&client, "die").await.unwrap(), "again die");
    assert_eq!(hanging.await.unwrap().unwrap_err().outcome(), Outcome::Unknown);
    assert_eq!(call(&client, "ok").await.unwrap(), "again ok");
    assert_eq!(lab.count("notifications/cancelled"), 2);
    client.shutdown(PATIENCE).await;
}

#[tokio::test]
async fn a_server_that_is_silent_is_replaced_once_it_does_not_answer_a_probe() {
    let lab = Lab::new();
    let connector = lab.connector("deaf=deaf").probe_timeout(Duration::from_millis(50));
    let client = lab.stack(connector);
    assert_eq!(call(&client, "ok").await.unwrap(), "ok");
    let limited = Request::from(tool("w_hang")).within(Duration::from_millis(500));
    assert_eq!(client.send(limited).await.unwrap_err().outcome(), Outcome::Unknown);
    // One that is called while the probe is under way, and sends nothing any more, does not put off the end.
    let next = client.clone().ready().await.unwrap().call(Request::from(tool("ok")));
    let closes = until(|| {
        client.generation().is_none() || client.peer().is_none_or(|peer| peer.is_transport_closed())
    });
    tokio::time::timeout(SOON, closes).await.expect("it closes before that one's deadline");
    next.await.unwrap();
    assert_eq!(client.generation(), Some(2));
    client.shutdown(PATIENCE).await;

    // One that answers stays.
    let lab = Lab::new();
    let client = lab.stack(lab.connector("").probe_timeout(PATIENCE));
    assert_eq!(call(&client, "ok").await.unwrap(), "ok");
    let limited = Request::from(tool("w_hang")).within(Duration::from_millis(500));
    assert_eq!(client.send(limited).await.unwrap_err().outcome(), Outcome::Unknown);
    until(|| lab.count("ping") == 1).await;
    assert_eq!(call(&client, "ok").await.unwrap(), "ok");
    assert_eq!(client.generation(), Some(1));
    client.shutdown(PATIENCE).await;
}

#[tokio::test]
async fn an_answer_without_an_id_ends_no_call_before_its_deadline_and_hurts_no_other() {
    let lab = Lab::new();
    let client = lab.client("");
    assert_eq!(call(&client, "ok").await.unwrap(), "ok");
    let limited = Request::from(tool("null_id")).within(Duration::from_millis(500));
    assert_eq!(client.send(limited).await.unwrap_err().outcome(), Outcome::Unknown);
    assert_eq!(call(&client, "ok").await.unwrap(), "ok");
    assert_eq!(client.generation(), Some(1));
    client.shutdown(PATIENCE).await;
}

#[tokio::test]
async fn sixteen_calls_over_a_restart_share_one_new_process_and_are_judged_each_alone() {
    let lab = Lab::new();
    let client = lab.client("");
    assert_eq!(call(&client, "ok").await.unwrap(), "ok");
    let mut calls = Vec::new();
    for at in 0..16 {
        let client = client.clone();
        let name = if at % 2 == 0 { "hang" } else { "w_hang" };
        calls.push(tokio::spawn(async move { (name, call(&client, name).await) }));
    }
    until(|| lab.count("hang") == 8 && lab.count("w_hang") == 8).await;
    let dying = call(&client, "w_die").await.unwrap_err();
    assert_eq!(dying.outcome(), Outcome::Unknown);
    for ended in calls {
        match ended.await.unwrap() {
            ("hang", outcome) => assert_eq!(outcome.unwrap(), "again hang"),
            (_, outcome) => assert_eq!(outcome.unwrap_err().outcome(), Outcome::Unknown),
        }
    }
    assert_eq!(client.generation(), Some(2));
    assert_eq!((lab.count("start"), lab.count("hang"), lab.count("w_hang")), (2, 16, 8));
    assert_eq!(lab.count("w_die"), 1);
    client.shutdown(PATIENCE).await;
}

#[tokio::test]
async fn the_session_is_restored_before_any_call_runs_on_the_next_connection() {
    for is_by_hand in [false, true] {
        let lab = Lab::new();
        let client = lab.client("");
        if is_by_hand {
            for (method, params) in [
                ("logging/setLevel", json!({ "level": "debug" })),
                ("resources/subscribe", json!({ "uri": "a:1" })),
                ("resources/subscribe", json!({ "uri": "a:2" })),
                ("resources/unsubscribe", json!({ "uri": "a:1" })),
            ] {
                client.send(by_hand(method, params)).await.unwrap();
            }
        } else {
            #[expect(deprecated)]
            {
                client.set_level(SetLevelRequestParams::new(LoggingLevel::Debug)).await.unwrap();
                client.subscribe(SubscribeRequestParams::new("a:1")).await.unwrap();
                client.subscribe(SubscribeRequestParams::new("a:2")).await.unwrap();
                client.unsubscribe(UnsubscribeRequestParams::new("a:1")).await.unwrap();
            }
        }
        assert_eq!(call(&client, "die").await.unwrap(), "again die");
        assert_eq!(
            lab.asked(),
            [
                "logging/setLevel",
                "resources/subscribe",
                "resources/subscribe",
                "resources/unsubscribe",
                "die",
                "logging/setLevel",
                "resources/subscribe",
                "die"
            ]
        );
        client.shutdown(PATIENCE).await;
    }
}

/// In the SDK's form for what it has no type for.
fn by_hand(method: &str, params: Value) -> Request {
    Request::new(CustomRequest::new(method, Some(params)))
}

#[tokio::test]
async fn a_trusted_annotation_makes_a_read_and_one_that_is_taken_back_makes_none() {
    let tools = r#"
        hint='"readOnlyHint":true'; [ -n "$first" ] || hint='"readOnlyHint":false'
        tools() { answer '{"tools":[{"name":"die","inputSchema":{"type":"object"},"annotations":{'"$hint"'}}]}'; }"#;
    let lab = Lab::new();
    let trusting = Connector::stdio((), lab.command(tools)).tools(ToolRules::new().trust_annotations());
    let client = lab.stack(trusting);
    client.ping().await.unwrap();
    let error = call(&client, "die").await.unwrap_err();
    assert!(matches!(error.cause(), Cause::Refused(Refusal::EffectChanged)), "{error:?}");
    assert_eq!((error.basis(), error.outcome()), (Basis::TrustedAnnotation, Outcome::Unknown));
    assert_eq!(lab.asked(), ["tools/list", "die", "tools/list"]);
    client.shutdown(PATIENCE).await;

    // Without trust it is a write.
    let lab = Lab::new();
    let client = lab.stack(Connector::stdio((), lab.command(tools)));
    assert_eq!(call(&client, "die").await.unwrap_err().basis(), Basis::Default);
    assert_eq!(lab.asked(), ["die"]);
    client.shutdown(PATIENCE).await;
}

#[tokio::test]
async fn a_list_of_tools_that_is_older_than_the_servers_word_of_a_change_is_not_trusted() {
    // Once it has begun to, the server says before each list that its tools have changed.
    let tools = r#"
        word() { echo '{"jsonrpc":"2.0","method":"notifications/tools/list_changed"}'; }
        change() { changing=yes; word; result changed; }
        tools() {
            [ -z "$changing" ] || word
            answer '{"tools":[{"name":"die","inputSchema":{"type":"object"},"annotations":{"readOnlyHint":true}}]}'
        }"#;
    let lab = Lab::new();
    let trusting = Connector::stdio((), lab.command(tools)).tools(ToolRules::new().trust_annotations());
    let client = lab.stack(trusting);
    client.ping().await.unwrap();
    assert_eq!(call(&client, "change").await.unwrap(), "changed");
    until(|| lab.count("tools/list") > 3).await;
    let error = call(&client, "die").await.unwrap_err();
    assert_eq!((error.basis(), error.outcome()), (Basis::Default, Outcome::Unknown));
    assert_eq!(lab.count("die"), 1);
    client.shutdown(PATIENCE).await;
}

#[tokio::test]
async fn a_page_of_a_lost_session_is_refused_and_a_whole_list_begun_again() {
    let pages = r#"
        tools() {
            case $line in
                *cursor*) [ -z "$first" ] || die; answer '{"tools":[{"name":"b","inputSchema":{"type":"object"}}]}' ;;
                *) answer '{"tools":[{"name":"a","inputSchema":{"type":"object"}}],"nextCursor":"'"${first:-second}"'"}' ;;
            esac
        }"#;
    let lab = Lab::new();
    let client = lab.client(pages);
    let names: Vec<_> = client.list_all_tools().await.unwrap().into_iter().map(|tool| tool.name).collect();
    assert_eq!(names, ["a", "b"]);
    assert_eq!(client.generation(), Some(2));
    let page = |cursor: &str| PaginatedRequestParams::default().with_cursor(Some(cursor.into()));
    let by_hand = |method| by_hand(method, json!({ "cursor": "first" }));
    let typed = Request::list_tools(Some(page("first")));
    for old in [typed, by_hand("tools/list"), by_hand("tasks/list")] {
        let error = client.send(old).await.unwrap_err();
        assert!(matches!(error.cause(), Cause::Refused(Refusal::CursorOfAnotherSession)));
    }
    client.shutdown(PATIENCE).await;
}

const MODERN: &str = r#"
discover() { answer '{"resultType":"complete","supportedVersions":["2026-07-28"],"capabilities":{"tools":{}},"ttlMs":0,"cacheScope":"private"}'; }
initialize() { refuse -32022; }
"#;

#[tokio::test]
async fn all_three_lifecycles_begin_a_connection_and_begin_it_again() {
    let versions = || vec![ProtocolVersion::V_2026_07_28];
    let auto = || ClientLifecycleMode::Auto { preferred_versions: versions(), legacy_version: None };
    for (mode, before, protocol, asked) in [
        (ClientLifecycleMode::Initialize, "", "2025-06-18", vec!["die", "die"]),
        (
            ClientLifecycleMode::Discover { preferred_versions: versions() },
            MODERN,
            "2026-07-28",
            vec!["server/discover", "die", "server/discover", "die"],
        ),
        (auto(), MODERN, "2026-07-28", vec!["server/discover", "die", "server/discover", "die"]),
        // What the server does not know it is asked once.
        (auto(), "", "2025-06-18", vec!["server/discover", "die", "die"]),
    ] {
        let lab = Lab::new();
        let client = lab.stack(lab.connector(before).lifecycle(mode));
        assert_eq!(call(&client, "die").await.unwrap(), "again die");
        assert_eq!(client.server_info().unwrap().protocol_version.as_str(), protocol);
        let recovered = lab.events("recovery");
        assert_eq!(recovered.len(), 1);
        let asked: Vec<_> = asked.into_iter().map(str::to_owned).collect();
        let known: Vec<_> = lab.asked();
        // The probe of the recovery asks too.
        assert_eq!(known[..asked.len()], asked[..], "{known:?}");
        client.shutdown(PATIENCE).await;
    }
}

#[tokio::test]
async fn a_server_that_does_not_get_through_its_handshake_says_why_and_the_call_is_not_done() {
    let lab = Lab::new();
    let client = lab.client("echo 'no config' >&2; exit 3");
    let error = call(&client, "w_ok").await.unwrap_err();
    assert_eq!(error.outcome(), Outcome::NotDone);
    let why = error.get_ref::<InitializeError>().unwrap();
    assert_eq!(why.stderr(), ["no config"]);
    // Whether its end or the broken pipe is seen first.
    let text = error.to_string();
    assert!(text.contains("cannot connect: the handshake failed: the "), "{text}");
    assert!(text.ends_with(" (exit status: 3; its stderr is in the `InitializeError`)"), "{text}");
    assert_eq!(why.exit().and_then(|status| status.code()), Some(3));
    assert!(!text.contains("no config"), "{text}");

    let lab = Lab::new();
    let client = lab.client("initialize() { refuse -32602; }");
    let error = call(&client, "w_ok").await.unwrap_err();
    let text = "the handshake failed: the server answered with the error -32602 (its message is in the `InitializeError`)";
    assert!(error.to_string().ends_with(text), "{error}");
}

#[tokio::test]
async fn a_server_that_prints_something_else_than_an_answer_is_named_when_the_time_is_up() {
    let lab = Lab::new();
    let connector = lab.connector("echo Welcome; echo token=hunter2; exec sleep 60");
    let client = Stack::builder(connector).deadline(Duration::from_secs(3)).build().unwrap();
    let error = call(&client, "w_ok").await.unwrap_err();
    let text = "no connection yet; the server was started and has not answered `initialize`; 2 lines of its output were no \
                JSON-RPC messages (its standard output must carry nothing else)";
    assert!(error.to_string().contains(text) && !error.to_string().contains("hunter2"), "{error}");
    assert_eq!(error.outcome(), Outcome::NotDone);
    client.shutdown(Duration::ZERO).await;
    // One that answers all the same is understood, and what it prints is counted.
    let mut connector = lab.connector("echo Welcome; echo; echo '{'");
    let connection = tower::Service::call(&mut connector, ()).await.unwrap();
    assert_eq!(connection.ignored(), 2);
}

#[tokio::test]
async fn progress_extends_an_idle_limit_up_to_the_deadline() {
    let work = r#"
        w_work() {
            token=${line#*'"progressToken":'}; token=${token%%[,\}]*}
            i=0; while [ $i -lt "$steps" ]; do
                printf '{"jsonrpc":"2.0","method":"notifications/progress","params":{"progressToken":%s,"progress":%s}}\n' "$token" $i
                sleep 0.1; i=$((i+1))
            done; result worked
        }"#;
    let lab = Lab::new();
    let client = lab.client(&format!("steps=30\n{work}"));
    assert_eq!(call(&client, "ok").await.unwrap(), "ok");
    let patient = Request::from(tool("w_work")).idle(Duration::from_millis(2_500));
    let start = Instant::now();
    assert!(client.send(patient).await.is_ok());
    assert!(start.elapsed() > Duration::from_millis(2_500));
    client.shutdown(PATIENCE).await;

    let lab = Lab::new();
    let client = lab.client(&format!("steps=1000\n{work}"));
    assert_eq!(call(&client, "ok").await.unwrap(), "ok");
    let patient = Request::from(tool("w_work")).idle(SOON).within(Duration::from_millis(700));
    let error = client.send(patient).await.unwrap_err();
    assert_eq!(error.outcome(), Outcome::Unknown);
    assert!(matches!(error.cause(), Cause::Deadline));
    client.shutdown(PATIENCE).await;
}

// ===== a transport of the user's =====

/// Serves what its end of a pipe is asked, as the script says: `None` closes the pipe.
async fn serve(io: tokio::io::DuplexStream, script: Arc<Mutex<VecDeque<Option<&'static str>>>>) {
    let (read, mut write) = tokio::io::split(io);
    let mut lines = BufReader::new(read).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        let message: serde_json::Value = serde_json::from_str(&line).unwrap();
        let result = match message["method"].as_str() {
            Some("initialize") => json!({
                "protocolVersion": "2025-06-18", "capabilities": {}, "serverInfo": { "name": "mem", "version": "1" }
            }),
            Some("tools/call") => {
                let next = script.lock().unwrap().pop_front();
                match next {
                    Some(None) => return,
                    Some(Some(text)) => json!({ "content": [{ "type": "text", "text": text }] }),
                    None => json!({ "content": [{ "type": "text", "text": "none" }] }),
                }
            }
            _ if message.get("id").is_none() => continue,
            _ => json!({}),
        };
        let answer = json!({ "jsonrpc": "2.0", "id": message["id"], "result": result });
        write.write_all(format!("{answer}\n").as_bytes()).await.unwrap();
    }
}

fn in_memory(script: &[Option<&'static str>]) -> Connector {
    let script = Arc::new(Mutex::new(script.iter().copied().collect::<VecDeque<_>>()));
    Connector::new((), move || {
        let (ours, theirs) = tokio::io::duplex(1 << 16);
        tokio::spawn(serve(theirs, script.clone()));
        Ok(ours)
    })
    .tools(ToolRules::new().read_only(["ok"]))
}

#[tokio::test]
async fn a_transport_of_the_users_is_opened_anew_after_a_closure() {
    let lab = Lab::new();
    let client = lab.stack(in_memory(&[Some("one"), None, Some("two"), None]));
    assert_eq!(call(&client, "ok").await.unwrap(), "one");
    assert_eq!(call(&client, "ok").await.unwrap(), "two");
    assert_eq!(client.generation(), Some(2));
    let error = call(&client, "w_ok").await.unwrap_err();
    assert_eq!((error.outcome(), error.scope()), (Outcome::Unknown, Scope::Connection));
    assert_eq!(call(&client, "w_ok").await.unwrap(), "none");
    assert_eq!(client.generation(), Some(3));
    assert_eq!(client.shutdown(PATIENCE).await, 0);
}

/// A server in memory whose results come from that function, of a method and its parameters; and what it was asked.
fn answering(
    answer: impl Fn(&str, &Value) -> Value + Clone + Send + Sync + 'static,
) -> (Connector, Arc<Mutex<Vec<String>>>) {
    answering_if(move |method, params| Some(answer(method, params)))
}

/// The same; where there is no result, it closes the connection.
fn answering_if(
    answer: impl Fn(&str, &Value) -> Option<Value> + Clone + Send + Sync + 'static,
) -> (Connector, Arc<Mutex<Vec<String>>>) {
    let asked: Arc<Mutex<Vec<String>>> = Arc::default();
    let log = asked.clone();
    let connector = Connector::new((), move || {
        let (ours, theirs) = tokio::io::duplex(1 << 16);
        let (answer, log) = (answer.clone(), log.clone());
        tokio::spawn(async move {
            let (read, mut write) = tokio::io::split(theirs);
            let mut lines = BufReader::new(read).lines();
            while let Ok(Some(line)) = lines.next_line().await {
                let message: Value = serde_json::from_str(&line).unwrap();
                let method = message["method"].as_str().unwrap();
                if message.get("id").is_none() {
                    continue;
                }
                let result = if method == "initialize" {
                    json!({
                        "protocolVersion": "2025-06-18", "capabilities": {},
                        "serverInfo": { "name": "mem", "version": "1" },
                    })
                } else {
                    let mut params = message["params"].clone();
                    let Some(result) = answer(method, &params) else { return };
                    params.as_object_mut().map(|params| params.remove("_meta"));
                    log.lock().unwrap().push(format!("{method} {params}"));
                    result
                };
                let answer = json!({ "jsonrpc": "2.0", "id": message["id"], "result": result });
                write.write_all(format!("{answer}\n").as_bytes()).await.unwrap();
            }
        });
        Ok(ours)
    });
    (connector, asked)
}

#[tokio::test]
async fn resources_prompts_and_completions_are_got_by_the_sdks_own_types() {
    let (connector, asked) = answering(|method, params| match method {
        "resources/read" => json!({ "contents": [{ "uri": params["uri"], "text": "inside" }] }),
        "prompts/get" => json!({
            "description": "a prompt",
            "messages": [{ "role": "user", "content": { "type": "text", "text": params["name"] } }],
        }),
        "completion/complete" => json!({ "completion": { "values": ["Paris", "Parma"], "hasMore": true } }),
        _ => unreachable!("{method}"),
    });
    let client = Lab::new().stack(connector);

    let read = client.read_resource(ReadResourceRequestParams::new("file:///a")).await.unwrap();
    assert_eq!(
        serde_json::to_value(&read.contents).unwrap(),
        json!([{ "uri": "file:///a", "text": "inside" }])
    );
    let prompt = client.get_prompt(GetPromptRequestParams::new("review")).await.unwrap();
    assert_eq!(prompt.description.as_deref(), Some("a prompt"));
    assert_eq!(prompt.messages, [PromptMessage::new(Role::User, ContentBlock::text("review"))]);
    let argument = ArgumentInfo::new("city", "Par");
    let params = CompleteRequestParams::new(Reference::for_prompt("review"), argument);
    let complete = client.complete(params).await.unwrap().completion;
    assert_eq!((complete.values, complete.has_more), (vec!["Paris".into(), "Parma".into()], Some(true)));
    assert_eq!(
        *asked.lock().unwrap(),
        [
            r#"resources/read {"uri":"file:///a"}"#,
            r#"prompts/get {"name":"review"}"#,
            concat!(
                r#"completion/complete {"argument":{"name":"city","value":"Par"},"#,
                r#""ref":{"name":"review","type":"ref/prompt"}}"#
            ),
        ]
    );
    client.shutdown(PATIENCE).await;
}

#[tokio::test]
async fn a_whole_list_is_all_of_its_pages_in_their_order() {
    let (connector, asked) = answering(|method, params| {
        let second = params["cursor"] == "2";
        let name = if second { "b" } else { "a" };
        let (list, item) = match method {
            "prompts/list" => ("prompts", json!({ "name": name })),
            "resources/list" => ("resources", json!({ "name": name, "uri": format!("file:///{name}") })),
            "resources/templates/list" => {
                ("resourceTemplates", json!({ "name": name, "uriTemplate": format!("file:///{name}/{{x}}") }))
            }
            _ => unreachable!("{method}"),
        };
        if second { json!({ list: [item] }) } else { json!({ list: [item], "nextCursor": "2" }) }
    });
    let client = Lab::new().stack(connector);

    let names: Vec<_> =
        client.list_all_prompts().await.unwrap().into_iter().map(|prompt| prompt.name).collect();
    assert_eq!(names, ["a", "b"]);
    let uris: Vec<_> =
        client.list_all_resources().await.unwrap().into_iter().map(|resource| resource.uri).collect();
    assert_eq!(uris, ["file:///a", "file:///b"]);
    let templates = client.list_all_resource_templates().await.unwrap();
    let templates: Vec<_> = templates.into_iter().map(|template| template.uri_template).collect();
    assert_eq!(templates, ["file:///a/{x}", "file:///b/{x}"]);
    // And one page by itself.
    let page = client.list_resources(None).await.unwrap();
    assert_eq!((page.resources.len(), page.next_cursor.as_deref()), (1, Some("2")));
    let page = client.list_prompts(None).await.unwrap();
    assert_eq!((page.prompts[0].name.as_str(), page.next_cursor.as_deref()), ("a", Some("2")));
    let next = PaginatedRequestParams::default().with_cursor(page.next_cursor);
    let page = client.list_resource_templates(Some(next)).await.unwrap();
    assert_eq!((page.resource_templates[0].name.as_str(), page.next_cursor), ("b", None));
    let lists = ["prompts/list", "resources/list", "resources/templates/list"];
    let asked: Vec<_> = asked.lock().unwrap().drain(..).collect();
    for (at, method) in lists.iter().enumerate() {
        assert!(asked[2 * at].starts_with(&format!("{method} ")), "{asked:?}");
        assert_eq!(asked[2 * at + 1], format!(r#"{method} {{"cursor":"2"}}"#));
    }
    assert_eq!(asked.len(), 9);
    client.shutdown(PATIENCE).await;
}

#[tokio::test(start_paused = true)]
async fn a_session_whose_server_hands_out_cursor_after_cursor_takes_the_last_ones() {
    let pages = Arc::new(std::sync::atomic::AtomicU64::new(0));
    let (connector, _) = answering_if(move |method, params| match method {
        "tools/call" => None,
        "prompts/list" => {
            let page = pages.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            let prompts = json!([{ "name": format!("p{page}") }]);
            Some(match params.get("cursor") {
                None => json!({ "prompts": prompts, "nextCursor": format!("after {page}") }),
                Some(_) => json!({ "prompts": prompts }),
            })
        }
        _ => Some(json!({})),
    });
    let client = Lab::new().stack(connector);
    assert_eq!(client.list_all_prompts().await.unwrap().len(), 2);
    call(&client, "w_die").await.unwrap_err();
    for _ in 0..1_100 {
        assert_eq!(client.list_all_prompts().await.unwrap().len(), 2);
    }
    assert_eq!(client.generation(), Some(2));
}

#[tokio::test]
async fn a_list_that_names_its_own_page_as_the_next_does_not_go_on_for_ever() {
    let (connector, asked) = answering(|_, _| json!({ "prompts": [], "nextCursor": "again" }));
    let client = Lab::new().stack(connector);
    let error = client.list_all_prompts().await.unwrap_err();
    assert_eq!(error.outcome(), Outcome::Answered, "{error:?}");
    assert!(matches!(error.get_ref::<ServiceError>(), Some(ServiceError::UnexpectedResponse)), "{error:?}");
    assert_eq!(asked.lock().unwrap().len(), 2);
    client.shutdown(PATIENCE).await;
}

#[tokio::test]
async fn a_tools_result_without_content_is_a_result_and_what_is_none_is_an_answer_of_another_kind() {
    let (connector, asked) = answering(|_, params| params["arguments"]["answer"].clone());
    let client = Lab::new().stack(connector);
    let answered = async |answer: Value| {
        let mut params = tool("w_odd");
        params.arguments = json!({ "answer": answer }).as_object().cloned();
        client.call_tool(params).await
    };
    let expected = |meta: Option<Value>, complete: bool| {
        let mut result = CallToolResult::default();
        result.meta = meta.map(|meta| serde_json::from_value(meta).unwrap());
        result.result_type = complete.then_some(ResultType::COMPLETE);
        result
    };
    let meta = json!({ "trace": 7 });
    for (answer, meta, complete) in [
        (json!({}), None, false),
        (json!({ "resultType": "complete" }), None, true),
        (json!({ "resultType": "complete", "_meta": meta }), Some(meta.clone()), true),
        (json!({ "_meta": meta }), Some(meta.clone()), false),
    ] {
        assert_eq!(answered(answer.clone()).await.unwrap(), expected(meta, complete), "{answer}");
    }
    let failed = answered(json!({ "content": [], "isError": true })).await.unwrap();
    assert_eq!((failed.is_error, failed.content.len()), (Some(true), 0));
    let structured = answered(json!({ "structuredContent": { "x": 1 } })).await.unwrap();
    assert_eq!(structured.structured_content, Some(json!({ "x": 1 })));

    for other in [
        json!({ "_meta": 7 }),
        json!({ "_meta": {}, "more": 1 }),
        json!({ "tools": [] }),
        json!({ "toolResult": 4711 }),
        json!([1]),
        json!(null),
    ] {
        let error = answered(other.clone()).await.unwrap_err();
        assert_eq!((error.outcome(), error.delivery()), (Outcome::Answered, Delivery::Answered), "{other}");
        let unexpected = matches!(error.get_ref::<ServiceError>(), Some(ServiceError::UnexpectedResponse));
        assert!(unexpected, "{other}: {error:?}");
        assert!(error.to_string().contains("the answer is of another kind"), "{error}");
        assert!(!error.to_string().contains("4711"), "{error}");
        // It may be the result of a write that was done.
        assert!(matches!(error.cause(), Cause::AnswerUnread) && error.may_have_landed(), "{error:?}");
        assert!(!error.to_string().contains("error of its own"), "{error}");
    }
    assert_eq!((asked.lock().unwrap().len(), client.generation()), (12, Some(1)), "each was sent once");
    client.shutdown(PATIENCE).await;
}

#[tokio::test]
async fn a_reading_method_that_is_answered_by_another_kind_of_result_is_answered_and_did_nothing() {
    let (connector, asked) = answering(|_, _| json!({ "toolResult": 4711 }));
    let client = Lab::new().stack(connector);
    let errors = [
        client.list_tools(None).await.unwrap_err(),
        client.list_all_resources().await.unwrap_err(),
        client.read_resource(ReadResourceRequestParams::new("a:1")).await.unwrap_err(),
        client.get_prompt(GetPromptRequestParams::new("p")).await.unwrap_err(),
    ];
    for error in errors {
        assert!(matches!(error.cause(), Cause::AnswerUnread), "{error:?}");
        assert_eq!((error.outcome(), error.may_have_landed()), (Outcome::Answered, false), "{error}");
        assert!(!error.method().is_empty() && !error.to_string().contains("error of its own"), "{error}");
    }
    assert_eq!(asked.lock().unwrap().len(), 4);
    client.shutdown(PATIENCE).await;
}

#[tokio::test]
async fn a_write_that_is_replayed_by_its_key_has_the_same_one_in_both_attempts() {
    let in_argument = ("/arguments/options/key", KeyedWrites::argument("/options/key"));
    let in_meta = ("/_meta/example.org~1key", KeyedWrites::meta("example.org/key"));
    for (place, keyed) in [in_argument, in_meta] {
        let keys: Arc<Mutex<Vec<String>>> = Arc::default();
        let seen = keys.clone();
        // Each call's first attempt ends with its connection.
        let (connector, _) = answering_if(move |method, params| {
            if method != "tools/call" {
                return Some(json!({}));
            }
            let key = params.pointer(place).and_then(Value::as_str).expect("a key");
            assert_eq!(params["arguments"]["amount"], 7);
            seen.lock().unwrap().push(key.to_owned());
            seen.lock().unwrap().len().is_multiple_of(2).then(|| json!({ "content": [] }))
        });
        let writes = WriteSafetyLayer::refuse().keyed(keyed.honoured_for(PATIENCE));
        let client: Client = Stack::builder(connector).deadline(PATIENCE).writes(writes).build().unwrap();
        let pay = || Request::tool("w_pay", json!({ "amount": 7, "options": { "x": 1 } }));
        for _ in 0..2 {
            assert!(client.send(pay()).await.is_ok(), "{place}");
        }
        let sent = keys.lock().unwrap().clone();
        assert_eq!(sent.len(), 4, "{place}: {sent:?}");
        assert_eq!((&sent[0], &sent[2]), (&sent[1], &sent[3]), "{place}");
        assert_ne!(sent[0], sent[2], "another call has another key");
        assert!(sent[0].parse::<EntryId>().is_ok(), "{place}: it can be had again from the ledger");
        assert_eq!(client.generation(), Some(3));

        // The caller's own key is kept, and nothing is declared of it.
        if place.starts_with("/arguments") {
            let own = Request::tool("w_pay", json!({ "amount": 7, "options": { "key": "mine" } }));
            assert_eq!(client.send(own).await.unwrap_err().outcome(), Outcome::Unknown);
            assert_eq!(keys.lock().unwrap()[4..], ["mine"]);
        }
        client.shutdown(PATIENCE).await;
    }
}

/// A stream that is not connected any more once it has taken some bytes of a tool's call.
struct CutShort(tokio::io::DuplexStream, bool);

impl tokio::io::AsyncRead for CutShort {
    fn poll_read(
        mut self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
        buf: &mut tokio::io::ReadBuf<'_>,
    ) -> std::task::Poll<std::io::Result<()>> {
        std::pin::Pin::new(&mut self.0).poll_read(cx, buf)
    }
}

impl tokio::io::AsyncWrite for CutShort {
    fn poll_write(
        mut self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
        bytes: &[u8],
    ) -> std::task::Poll<std::io::Result<usize>> {
        if self.1 {
            return std::task::Poll::Ready(Err(std::io::ErrorKind::NotConnected.into()));
        }
        // All but the newline: many a server runs that.
        self.1 = String::from_utf8_lossy(bytes).contains("tools/call");
        let bytes = if self.1 { &bytes[..bytes.len() - 1] } else { bytes };
        std::pin::Pin::new(&mut self.0).poll_write(cx, bytes)
    }

    fn poll_flush(
        mut self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<std::io::Result<()>> {
        std::pin::Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(
        mut self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<std::io::Result<()>> {
        std::pin::Pin::new(&mut self.0).poll_shutdown(cx)
    }
}

#[tokio::test]
async fn a_write_of_which_a_transport_of_the_users_lost_the_end_is_unknown_and_not_sent_again() {
    let opened = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let count = opened.clone();
    let connector = Connector::new((), move || {
        count.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let (ours, theirs) = tokio::io::duplex(1 << 16);
        tokio::spawn(serve(theirs, Arc::default()));
        Ok(CutShort(ours, false))
    });
    let client = Lab::new().stack(connector);
    let error = call(&client, "w_ok").await.unwrap_err();
    assert_eq!((error.outcome(), error.attempts().len()), (Outcome::Unknown, 1), "{error:?}");
    assert_eq!(opened.load(std::sync::atomic::Ordering::Relaxed), 1);
    client.shutdown(PATIENCE).await;
}

#[tokio::test]
async fn the_users_handler_serves_the_server_over_all_connections() {
    #[derive(Default)]
    struct Handler {
        asked: Mutex<Vec<String>>,
    }
    impl ClientHandler for Handler {
        async fn ping(&self, _: rmcp::service::RequestContext<RoleClient>) -> Result<(), rmcp::ErrorData> {
            self.asked.lock().unwrap().push("ping".into());
            Ok(())
        }
    }
    let lab = Lab::new();
    let handler = Arc::new(Handler::default());
    let before = r#"w_ask() { printf '{"jsonrpc":"2.0","id":"s","method":"ping"}\n'; ask=$id; read -r line; id=$ask; say answered; result asked; }
        always=always"#;
    let connector = Connector::stdio(Arc::clone(&handler), lab.command(before))
        .tools(ToolRules::new().read_only(["last"]));
    let client = lab.stack(connector);
    for _ in 0..2 {
        assert_eq!(call(&client, "w_ask").await.unwrap(), "asked");
        assert_eq!(call(&client, "last").await.unwrap(), "last");
        until(|| client.peer().is_none_or(|peer| peer.is_transport_closed())).await;
    }
    assert_eq!(*handler.asked.lock().unwrap(), ["ping", "ping"]);
    assert_eq!(lab.count("answered"), 2);
    client.shutdown(PATIENCE).await;
}

#[tokio::test(start_paused = true)]
async fn a_question_whose_handler_panics_is_answered_and_holds_up_no_deadline() {
    struct Panics;
    impl ClientHandler for Panics {
        async fn create_elicitation(
            &self,
            _: ElicitRequestParams,
            _: rmcp::service::RequestContext<RoleClient>,
        ) -> Result<ElicitResult, rmcp::ErrorData> {
            panic!("the user's handler panics, as this test wants")
        }
    }
    let answers: Arc<Mutex<Vec<Value>>> = Arc::default();
    let seen = Arc::clone(&answers);
    let connector = Connector::new(Panics, move || {
        let (ours, theirs) = tokio::io::duplex(1 << 16);
        let seen = Arc::clone(&seen);
        tokio::spawn(async move {
            let (read, mut write) = tokio::io::split(theirs);
            let mut lines = BufReader::new(read).lines();
            while let Ok(Some(line)) = lines.next_line().await {
                let message: Value = serde_json::from_str(&line).unwrap();
                let reply = match message["method"].as_str() {
                    Some("initialize") => json!({ "jsonrpc": "2.0", "id": message["id"], "result": {
                        "protocolVersion": "2025-06-18", "capabilities": {},
                        "serverInfo": { "name": "mem", "version": "1" },
                    } }),
                    // It asks the user, and never answers the call.
                    Some("tools/call") => json!({
                        "jsonrpc": "2.0", "id": "q1", "method": "elicitation/create",
                        "params": { "message": "sure?", "requestedSchema": { "type": "object", "properties": {} } },
                    }),
                    Some(_) => continue,
                    None => {
                        seen.lock().unwrap().push(message);
                        continue;
                    }
                };
                write.write_all(format!("{reply}\n").as_bytes()).await.unwrap();
            }
        });
        Ok::<_, std::io::Error>(ours)
    });
    let client = Lab::new().stack(connector);
    let write = Request::from(tool("w_ask")).pause_while_asking().within(Duration::from_secs(5));
    let start = tokio::time::Instant::now();
    let error = tokio::time::timeout(Duration::from_secs(3600), client.send(write)).await;
    let error = error.expect("a panic is no user who takes his time").unwrap_err();
    assert_eq!((error.outcome(), start.elapsed()), (Outcome::Unknown, Duration::from_secs(5)));
    let answers = answers.lock().unwrap();
    assert_eq!((answers.len(), &answers[0]["id"]), (1, &json!("q1")));
    assert_eq!(answers[0]["error"]["code"], -32603);
    assert!(!answers[0].to_string().contains("as this test wants"));
}

/// A user who makes up his mind about no question.
struct Undecided;

impl ClientHandler for Undecided {
    async fn create_elicitation(
        &self,
        _: ElicitRequestParams,
        _: rmcp::service::RequestContext<RoleClient>,
    ) -> Result<ElicitResult, rmcp::ErrorData> {
        std::future::pending().await
    }
}

fn question(id: &str) -> Value {
    let params = json!({ "message": "sure?", "requestedSchema": { "type": "object", "properties": {} } });
    json!({ "jsonrpc": "2.0", "id": id, "method": "elicitation/create", "params": params })
}

fn taken_back(id: &str) -> Value {
    json!({ "jsonrpc": "2.0", "method": "notifications/cancelled", "params": { "requestId": id } })
}

/// A server that says such things before it answers `initialize`, when a tool is called, and ten seconds after that.
/// It answers no call of a tool; what it is answered is kept.
fn saying(
    in_handshake: Vec<Value>,
    at_call: Vec<Value>,
    later: Vec<Value>,
) -> (Connector, Arc<Mutex<Vec<Value>>>) {
    let answers: Arc<Mutex<Vec<Value>>> = Arc::default();
    let seen = Arc::clone(&answers);
    let connector = Connector::new(Undecided, move || {
        let (ours, theirs) = tokio::io::duplex(1 << 16);
        let (seen, in_handshake) = (Arc::clone(&seen), in_handshake.clone());
        let (at_call, later) = (at_call.clone(), later.clone());
        tokio::spawn(async move {
            let (read, mut write) = tokio::io::split(theirs);
            let mut lines = BufReader::new(read).lines();
            while let Ok(Some(line)) = lines.next_line().await {
                let message: Value = serde_json::from_str(&line).unwrap();
                let answer =
                    |result: Value| json!({ "jsonrpc": "2.0", "id": message["id"], "result": result });
                let mut said = Vec::new();
                match message["method"].as_str() {
                    Some("initialize") => {
                        said.clone_from(&in_handshake);
                        said.push(answer(json!({
                            "protocolVersion": "2025-06-18", "capabilities": {},
                            "serverInfo": { "name": "mem", "version": "1" },
                        })));
                    }
                    Some("ping") => said.push(answer(json!({}))),
                    Some("tools/call") => said.clone_from(&at_call),
                    Some(_) => {}
                    None => seen.lock().unwrap().push(message.clone()),
                }
                for said in said {
                    write.write_all(format!("{said}\n").as_bytes()).await.unwrap();
                }
                if message["method"] == "tools/call" && !later.is_empty() {
                    tokio::time::sleep(Duration::from_secs(10)).await;
                    for said in &later {
                        write.write_all(format!("{said}\n").as_bytes()).await.unwrap();
                    }
                }
            }
        });
        Ok::<_, std::io::Error>(ours)
    });
    (connector, answers)
}

/// The SDK drops a question of the handshake without an answer. No later call stands still for its sake, nor for one
/// that was taken back.
#[tokio::test(start_paused = true)]
async fn a_question_that_nobody_will_answer_holds_up_no_call_for_ever() {
    for (what, in_handshake, at_call) in [
        ("none", vec![], vec![]),
        ("in the handshake", vec![question("q")], vec![]),
        ("taken back", vec![], vec![question("q"), taken_back("q")]),
        ("twice, and taken back", vec![], vec![question("q"), question("q"), taken_back("q")]),
        ("both", vec![question("q")], vec![question("q"), taken_back("q")]),
    ] {
        let (connector, _) = saying(in_handshake, at_call, vec![]);
        let client = Lab::new().stack(connector);
        let write = Request::from(tool("w_ask")).pause_while_asking().within(Duration::from_secs(2));
        let start = tokio::time::Instant::now();
        let error = tokio::time::timeout(Duration::from_secs(3600), client.send(write)).await;
        let error = error.unwrap_or_else(|_| panic!("{what}: hangs")).unwrap_err();
        assert_eq!((error.outcome(), start.elapsed()), (Outcome::Unknown, Duration::from_secs(2)), "{what}");
    }

    // One that is open holds it up all the same.
    let (connector, _) = saying(vec![], vec![question("q")], vec![taken_back("q")]);
    let client = Lab::new().stack(connector);
    let write = Request::from(tool("w_ask")).pause_while_asking().within(Duration::from_secs(2));
    let start = tokio::time::Instant::now();
    let error =
        tokio::time::timeout(Duration::from_secs(3600), client.send(write)).await.unwrap().unwrap_err();
    assert_eq!((error.outcome(), start.elapsed()), (Outcome::Unknown, Duration::from_secs(12)));
}

#[tokio::test(start_paused = true)]
async fn questions_that_were_taken_back_leave_their_places_to_others() {
    let ids: Vec<_> = (0..3_000).map(|nth| format!("q{nth}")).collect();
    let at_call = ids.iter().flat_map(|id| [question(id), taken_back(id)]).collect();
    let ping = json!({ "jsonrpc": "2.0", "id": "p", "method": "ping" });
    let (connector, answers) = saying(vec![], at_call, vec![ping]);
    let client = Lab::new().stack(connector);
    let call = client.send(Request::from(tool("w_ask")).within(Duration::from_secs(20))).await;
    assert_eq!(call.unwrap_err().outcome(), Outcome::Unknown);
    let answers = answers.lock().unwrap();
    assert_eq!((answers.len(), &answers[0]["id"], &answers[0]["result"]), (1, &json!("p"), &json!({})));
}

#[tokio::test]
async fn a_call_that_is_withdrawn_while_the_sdk_has_yet_to_take_it_leaves_nothing_behind() {
    let connection = tower::Service::call(&mut in_memory(&[]), ()).await.unwrap();
    let soon = tokio::time::Instant::now() + Duration::from_millis(1);
    let write = Request::from(tool("w_ok")).idle(PATIENCE).deadline(Deadline::At(soon));
    let progress = write.context().progress().cloned().unwrap();
    let mut call = tokio_test::task::spawn(tower::Service::call(&mut connection.clone(), write));
    assert!(call.poll().is_pending());
    // No other task runs meanwhile.
    std::thread::sleep(Duration::from_millis(5));
    let std::task::Poll::Ready(Err(error)) = call.poll() else { panic!("it is over") };
    assert_eq!(error.delivery(), Delivery::NotSent);
    drop((call, error));
    // Both have gone through the SDK by then.
    assert!(tower::Service::call(&mut connection.clone(), Request::ping()).await.is_ok());
    assert_eq!(Arc::strong_count(&progress), 1);
}

#[tokio::test(start_paused = true)]
async fn a_list_of_tools_that_was_read_before_they_changed_is_not_trusted() {
    // Lists after the first one are answered in the order in which the test says, with what it says.
    let lists: Arc<Mutex<Vec<Value>>> = Arc::default();
    let (say, said) = tokio::sync::mpsc::unbounded_channel::<Value>();
    let (asked, said) = (Arc::clone(&lists), Arc::new(tokio::sync::Mutex::new(said)));
    let connector = Connector::new((), move || {
        let (ours, theirs) = tokio::io::duplex(1 << 16);
        let (asked, said) = (Arc::clone(&asked), Arc::clone(&said));
        tokio::spawn(async move {
            let (read, mut write) = tokio::io::split(theirs);
            let mut lines = BufReader::new(read).lines();
            let mut said = said.lock().await;
            let mut first = true;
            loop {
                let answer = tokio::select! {
                    line = lines.next_line() => {
                        let Ok(Some(line)) = line else { return };
                        let message: Value = serde_json::from_str(&line).unwrap();
                        let id = &message["id"];
                        match message["method"].as_str() {
                            Some("initialize") => json!({ "jsonrpc": "2.0", "id": id, "result": {
                                "protocolVersion": "2025-06-18", "capabilities": { "tools": {} },
                                "serverInfo": { "name": "mem", "version": "1" },
                            } }),
                            Some("tools/list") if std::mem::take(&mut first) => listing(id, true),
                            Some("tools/list") => { asked.lock().unwrap().push(id.clone()); continue }
                            Some("tools/call") => json!({
                                "jsonrpc": "2.0", "id": id, "error": { "code": 1, "message": "no" },
                            }),
                            _ => continue,
                        }
                    }
                    Some(message) = said.recv() => message,
                };
                write.write_all(format!("{answer}\n").as_bytes()).await.unwrap();
            }
        });
        Ok::<_, std::io::Error>(ours)
    })
    .tools(ToolRules::new().trust_annotations());
    fn listing(id: &Value, reads: bool) -> Value {
        json!({ "jsonrpc": "2.0", "id": id, "result": { "tools": [{
            "name": "get", "inputSchema": { "type": "object" }, "annotations": { "readOnlyHint": reads },
        }] } })
    }
    let client = Lab::new().stack(connector);
    let taken_for = async || call(&client, "get").await.unwrap_err().effect();
    assert_eq!(taken_for().await, Effect::Write, "nothing is known before the first connection");
    assert_eq!(taken_for().await, Effect::ReadOnly);

    let changed = json!({ "jsonrpc": "2.0", "method": "notifications/tools/list_changed" });
    for lists_by_then in [1, 2] {
        say.send(changed.clone()).unwrap();
        until(|| lists.lock().unwrap().len() == lists_by_then).await;
        assert_eq!(taken_for().await, Effect::Write);
    }
    // The second is answered first. What the other one says was true before the tools changed.
    let ids = lists.lock().unwrap().clone();
    for (id, reads) in [(&ids[1], false), (&ids[0], true)] {
        say.send(listing(id, reads)).unwrap();
        tokio::time::sleep(Duration::from_millis(10)).await;
        assert_eq!(taken_for().await, Effect::Write);
    }
    client.shutdown(PATIENCE).await;
}

/// A server in memory that falls silent, and is heard again, when the test says so.
#[derive(Clone, Default)]
struct Moody {
    /// The tools that it was asked for, and an empty name for anything else.
    asked: Arc<Mutex<Vec<String>>>,
    silent: Arc<AtomicBool>,
    speaks: Arc<Notify>,
}

impl Moody {
    fn connector(&self) -> Connector {
        let moody = self.clone();
        Connector::new((), move || {
            let (ours, theirs) = tokio::io::duplex(1 << 16);
            tokio::spawn(moody.clone().serve(theirs));
            Ok::<_, std::io::Error>(ours)
        })
        .tools(ToolRules::new().read_only(["ok"]))
    }

    async fn serve(self, pipe: tokio::io::DuplexStream) {
        let (read, mut write) = tokio::io::split(pipe);
        let mut lines = BufReader::new(read).lines();
        loop {
            let line = tokio::select! {
                line = lines.next_line() => line,
                () = self.speaks.notified() => {
                    let word = json!({
                        "jsonrpc": "2.0", "method": "notifications/message",
                        "params": { "level": "info", "data": "awake" },
                    });
                    write.write_all(format!("{word}\n").as_bytes()).await.unwrap();
                    continue;
                }
            };
            let Ok(Some(line)) = line else { return };
            let message: Value = serde_json::from_str(&line).unwrap();
            let name = message["params"]["name"].as_str().unwrap_or_default();
            self.asked.lock().unwrap().push(name.to_owned());
            if self.silent.load(Ordering::Relaxed) || message.get("id").is_none() {
                continue;
            }
            let result = match message["method"].as_str() {
                Some("initialize") => json!({
                    "protocolVersion": "2025-06-18", "capabilities": {},
                    "serverInfo": { "name": "mem", "version": "1" },
                }),
                _ => json!({ "content": [] }),
            };
            let answer = json!({ "jsonrpc": "2.0", "id": message["id"], "result": result });
            write.write_all(format!("{answer}\n").as_bytes()).await.unwrap();
        }
    }

    /// Whether it answers from now on.
    fn answers(&self, answers: bool) {
        self.silent.store(!answers, Ordering::Relaxed);
    }

    /// It says something of its own accord.
    async fn speaks(&self) {
        self.speaks.notify_one();
        tokio::time::sleep(Duration::from_millis(1)).await;
    }

    fn count(&self, name: &str) -> usize {
        self.asked.lock().unwrap().iter().filter(|asked| *asked == name).count()
    }

    /// Falls silent and fails the probe, while a read that lasts long keeps the connection open. So many seconds after
    /// that began.
    async fn counts_as_gone(&self, client: &Client, seconds: u32) -> tokio::task::JoinHandle<()> {
        self.answers(false);
        let (long, short) = (client.clone(), client.clone());
        let keeps = tokio::spawn(async move {
            _ = long.oneshot(Request::from(tool("ok")).within(600 * SECOND)).await;
        });
        tokio::spawn(short.oneshot(Request::from(tool("ok")).within(SECOND)));
        // The question whether it is there has 5 seconds.
        tokio::time::sleep(seconds * SECOND).await;
        keeps
    }
}

#[tokio::test(start_paused = true)]
async fn nothing_is_sent_to_a_server_that_has_failed_the_probe_while_others_still_wait_for_it() {
    let server = Moody::default();
    let client = Arc::new(Lab::new().stack(server.connector()));
    client.call_tool(tool("w_ok")).await.unwrap();
    server.answers(false);
    let patient = Request::from(tool("w_long")).within(600 * SECOND);
    let patient = tokio::spawn({
        let client = Arc::clone(&client);
        async move { client.send(patient).await }
    });
    let expired = client.send(Request::from(tool("w_short")).within(SECOND)).await.unwrap_err();
    assert_eq!(expired.outcome(), Outcome::Unknown);
    // The question whether it is there has 5 seconds.
    tokio::time::sleep(10 * SECOND).await;
    let late = client.send(Request::from(tool("w_late")).within(2 * SECOND)).await.unwrap_err();
    assert_eq!((late.outcome(), late.delivery()), (Outcome::NotDone, Delivery::NotSent), "{late:?}");
    assert_eq!(server.count("w_late"), 0);

    // It is heard again: what waited is sent.
    let waits = Request::from(tool("w_waits")).within(60 * SECOND);
    let waits = tokio::spawn({
        let client = Arc::clone(&client);
        async move { client.send(waits).await }
    });
    tokio::time::sleep(SECOND).await;
    assert_eq!(server.count("w_waits"), 0);
    server.answers(true);
    server.speaks().await;
    assert!(waits.await.unwrap().is_ok());

    // It falls silent once more, for good: what waited for it goes to the next connection.
    server.answers(false);
    let expired = client.send(Request::from(tool("w_short")).within(SECOND)).await.unwrap_err();
    assert_eq!(expired.outcome(), Outcome::Unknown);
    tokio::time::sleep(10 * SECOND).await;
    let moves = Request::from(tool("w_moves")).within(3600 * SECOND);
    let moves = tokio::spawn({
        let client = Arc::clone(&client);
        async move { client.send(moves).await }
    });
    tokio::time::sleep(SECOND).await;
    server.answers(true);
    assert_eq!(patient.await.unwrap().unwrap_err().outcome(), Outcome::Unknown);
    assert!(moves.await.unwrap().is_ok());
    assert_eq!(client.generation(), Some(2));
    assert_eq!(server.count("w_moves"), 1);
}

/// The first write is called first, and goes after the second one, which is in doubt by then.
#[tokio::test(start_paused = true)]
async fn a_write_that_was_held_back_from_a_silent_server_counts_when_it_goes() {
    let server = Moody::default();
    let safety = WriteSafetyLayer::new(|doubt: InDoubt<Request, ServerResult>| async move {
        Ok(doubt.not_landed_because("nothing lands late here"))
    });
    let safety = safety.attempt_timeout(5 * SECOND);
    let client = Stack::builder(server.connector()).deadline(PATIENCE).writes(safety).build().unwrap();
    client.send(Request::from(tool("w_ok"))).await.unwrap();
    let _keeps = server.counts_as_gone(&client, 10).await;

    let call = |name| tokio_test::task::spawn(client.clone().oneshot(tool(name).into()));
    let (mut first, mut second) = (call("w_first"), call("w_second"));
    assert!(first.poll().is_pending() && second.poll().is_pending());
    server.speaks().await;
    assert!(second.poll().is_pending());
    tokio::time::sleep(SECOND).await;
    assert_eq!((server.count("w_first"), server.count("w_second")), (0, 1));
    server.answers(true);
    first.await.unwrap();
    // A replay of the second one would land on the first one.
    let error = second.await.unwrap_err();
    assert_eq!(error.outcome(), Outcome::NotDone, "{error:?}");
    assert_eq!((server.count("w_first"), server.count("w_second")), (1, 1));
}

/// Gives the first write and any other one to a client each, which it waits for on tasks; gives up the others.
#[derive(Clone)]
struct OnATask {
    first: Client,
    second: Client,
}

impl Service<Request> for OnATask {
    type Response = ServerResult;
    type Error = CallError;
    type Future = Pin<Box<dyn Future<Output = Result<ServerResult, CallError>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), CallError>> {
        ready!(Service::<Request>::poll_ready(&mut self.first, cx))?;
        Service::<Request>::poll_ready(&mut self.second, cx)
    }

    fn call(&mut self, request: Request) -> Self::Future {
        let (client, limit) = match request.tool_name() {
            Some("w_first") => (&mut self.first, 60 * SECOND),
            _ => (&mut self.second, SECOND),
        };
        let answer = tokio::spawn(client.call(request));
        Box::pin(async move {
            let answer = tokio::time::timeout(limit, answer).await;
            answer.map_or_else(|_| Err(CallError::ambiguous("given up")), Result::unwrap)
        })
    }
}

/// The same where the first one is waited for on a task, so that its layer is not polled between the two; the second one goes
/// to another server.
#[tokio::test(start_paused = true)]
async fn a_write_that_was_held_back_on_a_task_from_a_silent_server_counts_when_it_goes() {
    for is_keyed in [false, true] {
        let [silent, other] = [(); 2].map(|()| Moody::default());
        let [to_silent, to_other] = [&silent, &other].map(|server| -> Client {
            Stack::builder(server.connector()).deadline(PATIENCE).build().unwrap()
        });
        to_silent.send(Request::from(tool("w_ok"))).await.unwrap();
        to_other.send(Request::from(tool("w_ok"))).await.unwrap();
        let _keeps = silent.counts_as_gone(&to_silent, 10).await;
        other.answers(false);

        let safety = WriteSafetyLayer::new(|doubt: InDoubt<Request, ServerResult>| async move {
            Ok::<_, BoxError>(doubt.not_landed())
        });
        let safety = safety.quarantine(5 * SECOND).attempt_timeout(60 * SECOND);
        let safety = if is_keyed { safety.conflict_key(|_: &Request| Some("key")) } else { safety };
        let between = OnATask { first: to_silent, second: to_other };
        let service = tower::Layer::layer(&safety, between);
        let call = |name| {
            let request = Request::from(tool(name)).within(300 * SECOND);
            tokio_test::task::spawn(service.clone().oneshot(request))
        };
        let mut first = call("w_first");
        assert!(first.poll().is_pending());
        let second = tokio::spawn(call("w_second"));
        tokio::time::sleep(2 * SECOND).await;
        assert_eq!((silent.count("w_first"), other.count("w_second")), (0, 1), "the second one is in doubt");
        silent.answers(true);
        other.answers(true);
        silent.speaks().await;
        tokio::time::sleep(SECOND).await;
        first.await.unwrap();
        let error = second.await.unwrap().unwrap_err();
        assert_eq!(error.outcome(), Outcome::NotDone, "{error:?}");
        assert_eq!((silent.count("w_first"), other.count("w_second")), (1, 1), "{is_keyed}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_write_that_was_held_back_from_a_silent_server_does_not_go_once_its_key_is_in_doubt() {
    let server = Moody::default();
    let safety = WriteSafetyLayer::refuse().conflict_key(|_: &Request| Some("key"));
    let client = Stack::builder(server.connector()).deadline(PATIENCE).writes(safety).build().unwrap();
    client.send(Request::from(tool("w_ok"))).await.unwrap();
    let _keeps = server.counts_as_gone(&client, 10).await;

    let call = |name, limit| {
        tokio_test::task::spawn(client.clone().oneshot(Request::from(tool(name)).within(limit)))
    };
    let (mut first, mut second) = (call("w_first", PATIENCE), call("w_second", 3 * SECOND));
    assert!(first.poll().is_pending() && second.poll().is_pending());
    server.speaks().await;
    assert_eq!(second.await.unwrap_err().outcome(), Outcome::Unknown);
    server.answers(true);
    let error = first.await.unwrap_err();
    assert!(matches!(error.cause(), Cause::Refused(Refusal::KeyInDoubt(_))), "{error:?}");
    assert_eq!(error.outcome(), Outcome::NotDone);
    assert_eq!((server.count("w_first"), server.count("w_second")), (0, 1));
}

#[tokio::test(start_paused = true)]
async fn a_replay_that_was_held_back_from_a_silent_server_does_not_go_over_a_write_that_went_before_it() {
    let server = Moody::default();
    let keyed = KeyedWrites::argument("/key").honoured_for(600 * SECOND);
    let safety = WriteSafetyLayer::refuse().keyed(keyed).attempt_timeout(8 * SECOND);
    let client = Stack::builder(server.connector()).deadline(PATIENCE).writes(safety).build().unwrap();
    client.send(Request::from(tool("w_ok"))).await.unwrap();

    let call = |name| tokio_test::task::spawn(client.clone().oneshot(Request::tool(name, json!({}))));
    let mut first = call("w_first");
    server.answers(false);
    assert!(first.poll().is_pending());
    let _keeps = server.counts_as_gone(&client, 9).await;
    assert!(first.poll().is_pending(), "it is in doubt, and its replay is held back");
    let mut second = call("w_second");
    assert!(second.poll().is_pending());
    assert_eq!((server.count("w_first"), server.count("w_second")), (1, 0));
    server.answers(true);
    server.speaks().await;
    second.await.unwrap();
    let error = first.await.unwrap_err();
    assert_eq!(error.outcome(), Outcome::Unknown, "{error:?}");
    assert_eq!((server.count("w_first"), server.count("w_second")), (1, 1));
}

#[test]
fn options_of_another_transport_are_a_wrong_configuration() {
    let wrong =
        |connector: Connector| Stack::<_, Request, ServerResult>::builder(connector).build().unwrap_err();
    let http = || Connector::http((), "http://localhost:1/mcp");
    assert!(wrong(http().exit_ends_effects()).to_string().contains("exit_ends_effects"));
    assert!(wrong(http().stderr_lines(1)).to_string().contains("stderr_lines"));
    assert!(wrong(Connector::http((), "localhost")).to_string().contains("URL"));
    let child = Connector::stdio((), Command::new("sh"));
    let child = child.on_unauthorized(|_| async { Ok(String::new()) });
    assert!(wrong(child).to_string().contains("on_unauthorized"));
    assert!(wrong(http().probe_timeout(Duration::ZERO)).to_string().contains("probe_timeout"));
}

#[test]
fn a_request_says_what_it_may_do_and_hides_its_arguments() {
    let write = Request::tool("pay", json!({ "card": "4711" }));
    assert!(!format!("{write:?}").contains("4711"));
    assert_eq!(write.effect(), Effect::Write);
    assert_eq!(Request::list_tools(None).effect(), Effect::ReadOnly);
    let custom = |method: &str, params| Request::new(CustomRequest::new(method, Some(params)));
    assert_eq!(custom("acme/charge", json!({})).effect(), Effect::Write);
    assert_eq!(custom("tasks/get", json!({})).effect(), Effect::ReadOnly);
    assert_eq!(custom("resources/read", json!({ "requestState": "x" })).effect(), Effect::Write);
}

// ===== Streamable HTTP, what the tests of the fault tables do not have =====

/// What an HTTP server answers to a request's head and body.
type Answer = Box<dyn Fn(&str, &serde_json::Value) -> String + Send + Sync>;

/// A server of one answer a connection; its address, and what it was asked.
async fn http_server(answer: Answer) -> (String, Arc<Mutex<Vec<String>>>) {
    use tokio::io::AsyncReadExt;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}/mcp", listener.local_addr().unwrap());
    let asked: Arc<Mutex<Vec<String>>> = Arc::default();
    let log = asked.clone();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut bytes = Vec::new();
            let (head, body) = loop {
                let text = String::from_utf8_lossy(&bytes).into_owned();
                if let Some((head, body)) = text.split_once("\r\n\r\n") {
                    let head = head.to_ascii_lowercase();
                    let length = head.split("content-length: ").nth(1).and_then(|rest| rest.lines().next());
                    let length: usize = length.map_or(0, |length| length.parse().unwrap());
                    if body.len() >= length {
                        break (head, body.to_owned());
                    }
                }
                if stream.read_buf(&mut bytes).await.unwrap_or(0) == 0 {
                    break (String::new(), String::new());
                }
            };
            let message: serde_json::Value = serde_json::from_str(&body).unwrap_or_default();
            let verb = head.split(' ').next().unwrap_or_default().to_owned();
            let method = message["method"].as_str().unwrap_or_default();
            log.lock().unwrap().push(format!("{verb} {method}"));
            let answer = answer(&head, &message);
            tokio::spawn(async move {
                if verb == "get" {
                    // Time enough for other requests.
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                let _ = stream.write_all(answer.as_bytes()).await;
            });
        }
    });
    (address, asked)
}

fn respond(status: &str, headers: &str, body: &str) -> String {
    format!("HTTP/1.1 {status}\r\n{headers}Content-Length: {}\r\nConnection: close\r\n\r\n{body}", body.len())
}

/// What a server of sessions answers that has nothing against the request.
fn well(session: &str, message: &serde_json::Value) -> String {
    let result = match message["method"].as_str() {
        Some("initialize") => json!({
            "protocolVersion": "2025-06-18", "capabilities": {}, "serverInfo": { "name": "http", "version": "1" }
        }),
        Some("tools/call") => json!({ "content": [{ "type": "text", "text": session }] }),
        _ => json!({}),
    };
    if message.get("id").is_none() {
        return respond(if message.is_null() { "405 Method Not Allowed" } else { "202 Accepted" }, "", "");
    }
    let body = json!({ "jsonrpc": "2.0", "id": message["id"], "result": result }).to_string();
    respond("200 OK", &format!("Content-Type: application/json\r\nMcp-Session-Id: {session}\r\n"), &body)
}

#[tokio::test]
async fn a_lost_session_that_is_told_with_the_requests_own_id_is_a_lost_session_all_the_same() {
    let sessions = Arc::new(Mutex::new(0));
    let answer: Answer = Box::new(move |head, message| {
        let mut sessions = sessions.lock().unwrap();
        if message["method"] == "initialize" {
            *sessions += 1;
        }
        if *sessions == 1 && head.contains("mcp-session-id") && !message["id"].is_null() {
            let error = json!({ "code": -32000, "message": "Bad Request: No valid session ID provided" });
            let body = json!({ "jsonrpc": "2.0", "id": message["id"], "error": error }).to_string();
            return respond("400 Bad Request", "Content-Type: application/json\r\n", &body);
        }
        well(&format!("s{sessions}"), message)
    });
    let (address, asked) = http_server(answer).await;
    let lab = Lab::new();
    let rules = ToolRules::new().read_only(["ok"]);
    let client = lab.stack(Connector::http((), address).tools(rules));
    assert_eq!(call(&client, "ok").await.unwrap(), "s2");
    let error = call(&client, "w_ok").await;
    assert_eq!(error.unwrap(), "s2");
    assert_eq!(client.generation(), Some(2));
    let posts = asked.lock().unwrap().iter().filter(|asked| *asked == "post tools/call").count();
    assert_eq!(posts, 3);
    client.shutdown(PATIENCE).await;
}

#[tokio::test]
async fn an_error_that_comes_with_400_on_a_living_session_is_the_servers_answer() {
    let answer: Answer = Box::new(|_, message| {
        if message["method"] == "tools/call" {
            let error = json!({ "code": -32602, "message": "no such tool" });
            let body = json!({ "jsonrpc": "2.0", "id": message["id"], "error": error }).to_string();
            return respond("400 Bad Request", "Content-Type: application/json\r\n", &body);
        }
        well("s1", message)
    });
    let (address, _) = http_server(answer).await;
    let client = Lab::new().stack(Connector::http((), address));
    let error = call(&client, "w_ok").await.unwrap_err();
    assert_eq!(error.answer().unwrap().code, -32602);
    assert_eq!(client.generation(), Some(1));
    client.shutdown(PATIENCE).await;
}

#[tokio::test]
async fn credentials_that_are_refused_from_the_beginning_are_refreshed_for_handshake_and_stream() {
    let answer: Answer = Box::new(|head, message| {
        if !head.contains("authorization: bearer fresh") {
            return respond("401 Unauthorized", "WWW-Authenticate: Bearer\r\n", "");
        }
        well("s1", message)
    });
    let (address, asked) = http_server(answer).await;
    let refreshed = Arc::new(Mutex::new(0));
    let count = refreshed.clone();
    let connector = Connector::http((), address).on_unauthorized(move |refused: sdk::Unauthorized| {
        *count.lock().unwrap() += 1;
        async move {
            assert_eq!(refused.challenge(), Some("Bearer"));
            Ok("fresh".to_owned())
        }
    });
    let client = Lab::new().stack(connector);
    assert_eq!(call(&client, "w_ok").await.unwrap(), "s1");
    assert_eq!(*refreshed.lock().unwrap(), 1);
    until(|| asked.lock().unwrap().iter().any(|asked| asked == "get ")).await;
    let posts: Vec<_> =
        asked.lock().unwrap().iter().filter(|asked| asked.starts_with("post")).cloned().collect();
    assert_eq!(
        posts,
        ["post initialize", "post initialize", "post notifications/initialized", "post tools/call"]
    );
    client.shutdown(PATIENCE).await;
}

#[tokio::test]
async fn new_credentials_that_are_refused_in_turn_are_an_error_and_the_next_call_asks_again() {
    let answer: Answer = Box::new(|head, message| {
        let refused = message["method"] == "tools/call" && !head.contains("authorization: bearer 3");
        if refused { respond("401 Unauthorized", "", "") } else { well("s1", message) }
    });
    let (address, asked) = http_server(answer).await;
    let tokens = Arc::new(Mutex::new(0));
    let connector =
        Connector::http((), address).tools(ToolRules::new().read_only(["ok"])).on_unauthorized(move |_| {
            *tokens.lock().unwrap() += 1;
            let token = tokens.lock().unwrap().to_string();
            async move { Ok(token) }
        });
    let client = Lab::new().stack(connector);
    let error = call(&client, "ok").await.unwrap_err();
    assert!(matches!(error.cause(), Cause::Evidence(goaround::Evidence::Unauthorized)), "{error:?}");
    assert_eq!((error.outcome(), error.attempts().len()), (Outcome::NotDone, 2));
    let text = error.to_string();
    assert!(text.contains("unauthorized (401) (the credentials were refused (HTTP 401))"), "{text}");
    // A write is refreshed for, and not sent again.
    let error = call(&client, "w_ok").await.unwrap_err();
    assert_eq!((error.outcome(), error.attempts().len()), (Outcome::NotDone, 1));
    let posts = asked.lock().unwrap().iter().filter(|asked| *asked == "post tools/call").count();
    assert_eq!(posts, 3);
    client.shutdown(PATIENCE).await;
}

#[tokio::test]
async fn an_event_above_the_limit_is_an_answer_only_if_it_is_one() {
    let of = |message: &serde_json::Value, text: &str| match message["params"]["arguments"]["form"].as_str() {
        Some("id last") => {
            format!(r#"{{"result":{{"text":"{text}"}},"jsonrpc":"2.0","id":{}}}"#, message["id"])
        }
        Some("another's") => format!(r#"{{"jsonrpc":"2.0","id":999,"result":{{"text":"{text}"}}}}"#),
        Some("a question") => format!(r#"{{"jsonrpc":"2.0","id":{},"method":"{text}"}}"#, message["id"]),
        Some("nothing") => text.to_owned(),
        Some("a notification") => format!(
            "{{\"jsonrpc\":\"2.0\",\ndata: \"method\":\"notifications/message\",\ndata: \"params\":{{\"result\":\"{text}\"}}}}"
        ),
        _ => format!("{{\"jsonrpc\":\"2.0\",\ndata: \"id\":{},\ndata: \"error\":\"{text}\"}}", message["id"]),
    };
    let answer: Answer = Box::new(move |_, message| match message["method"].as_str() {
        Some("tools/call") => {
            let events = format!("data: {}\n\n", of(message, &"x".repeat(5 << 10)));
            respond("200 OK", "Content-Type: text/event-stream\r\n", &events)
        }
        _ => well("s1", message),
    });
    let (address, _) = http_server(answer).await;
    let config =
        rmcp::transport::streamable_http_client::StreamableHttpClientTransportConfig::with_uri(address)
            .max_sse_event_size(4 << 10);
    let client = Lab::new().stack(Connector::http((), config));
    for (form, outcome) in [
        ("id last", Outcome::Answered),
        ("an error", Outcome::Answered),
        ("another's", Outcome::Unknown),
        ("a question", Outcome::Unknown),
        ("nothing", Outcome::Unknown),
        ("a notification", Outcome::Unknown),
    ] {
        let error = client.send(Request::tool("w", json!({ "form": form }))).await.unwrap_err();
        assert_eq!((error.outcome(), client.generation()), (outcome, Some(1)), "{form}: {error:?}");
        let kind = error.get_ref::<sdk::HttpError>().map(sdk::HttpError::kind);
        let expected = (outcome == Outcome::Unknown).then_some(sdk::HttpErrorKind::EventTooLarge);
        assert_eq!(kind, expected, "{form}");
    }
    client.shutdown(PATIENCE).await;
}

#[tokio::test]
async fn a_stream_that_no_credentials_are_good_for_is_not_asked_for_without_end() {
    let answer: Answer = Box::new(|head, message| match head.starts_with("get ") {
        true => respond("401 Unauthorized", "", ""),
        false => well("s1", message),
    });
    let (address, asked) = http_server(answer).await;
    let connector = Connector::http((), address).on_unauthorized(|_| async { Ok("fresh".to_owned()) });
    let client = Arc::new(Lab::new().stack(connector));
    // Each answer says that the token is accepted.
    let calls = (0..8).map(|_| {
        let client = Arc::clone(&client);
        tokio::spawn(async move {
            for _ in 0..80 {
                assert_eq!(call(&client, "w_ok").await.unwrap(), "s1");
            }
        })
    });
    for calls in calls.collect::<Vec<_>>() {
        calls.await.unwrap();
    }
    client.shutdown(PATIENCE).await;
    // One repetition each time, and the SDK's own pauses between the times.
    let streams = asked.lock().unwrap().iter().filter(|asked| *asked == "get ").count();
    assert!((1..=12).contains(&streams), "{streams}");
}

#[tokio::test]
async fn the_sdks_own_http_transport_given_by_the_user_loses_a_call_and_not_its_siblings() {
    let fails = Arc::new(Mutex::new(VecDeque::from(["502 Bad Gateway", "404 Not Found"])));
    let answer: Answer = Box::new(move |head, message| {
        let failing = message["method"] == "tools/call" && message["params"]["name"] == "w_ok";
        let status = if failing { fails.lock().unwrap().pop_front() } else { None };
        let session = if head.contains("mcp-session-id: s1") { "s1" } else { "s" };
        status.map_or_else(|| well(session, message), |status| respond(status, "", ""))
    });
    let (address, asked) = http_server(answer).await;
    let connector = Connector::new((), move || {
        let config =
            StreamableHttpClientTransportConfig::with_uri(address.as_str()).reinit_on_expired_session(false);
        let client = reqwest::Client::builder().pool_max_idle_per_host(0).build().unwrap();
        Ok(StreamableHttpClientTransport::with_client(client, config))
    });
    let client = Lab::new().stack(connector);
    client.ping().await.unwrap();
    let lost = call(&client, "w_ok").await.unwrap_err();
    assert_eq!((lost.outcome(), lost.scope()), (Outcome::Unknown, Scope::Call), "{lost:?}");
    assert_eq!(lost.get_ref::<sdk::HttpError>().unwrap().status(), Some(502));
    client.ping().await.unwrap();
    assert_eq!(client.generation(), Some(1));
    let forgotten = call(&client, "w_ok").await.unwrap_err();
    assert!(matches!(forgotten.cause(), Cause::Evidence(goaround::Evidence::SessionUnknown)));
    assert_eq!((forgotten.outcome(), forgotten.scope()), (Outcome::Unknown, Scope::Connection));
    client.ping().await.unwrap();
    assert_eq!(client.generation(), Some(2));
    let posts = asked.lock().unwrap().iter().filter(|asked| *asked == "post tools/call").count();
    assert_eq!(posts, 2);
    client.shutdown(PATIENCE).await;
}

#[tokio::test]
async fn a_write_whose_redirect_leads_nowhere_over_a_transport_of_the_users_is_unknown() {
    let answer: Answer = Box::new(|_, message| match message["method"].as_str() {
        // It was done, and here is where to look.
        Some("tools/call") => respond("303 See Other", "Location: http://127.0.0.1:1/\r\n", ""),
        _ => well("s1", message),
    });
    let (address, asked) = http_server(answer).await;
    let connector = Connector::new((), move || {
        let config = StreamableHttpClientTransportConfig::with_uri(address.as_str());
        Ok(StreamableHttpClientTransport::with_client(reqwest::Client::new(), config))
    });
    let client = Lab::new().stack(connector);
    let error = call(&client, "w_ok").await.unwrap_err();
    assert_eq!(error.outcome(), Outcome::Unknown, "{error:?}");
    assert_eq!(error.get_ref::<sdk::HttpError>().unwrap().kind(), sdk::HttpErrorKind::Connect);
    assert_eq!(asked.lock().unwrap().iter().filter(|asked| *asked == "post tools/call").count(), 1);
    client.shutdown(PATIENCE).await;
}

#[tokio::test]
async fn a_write_whose_redirect_leads_to_a_refusal_is_unknown_where_a_client_of_the_users_follows_it() {
    for refusal in ["401 Unauthorized", "403 Forbidden", "404 Not Found", "429 Too Many Requests"] {
        let answer: Answer = Box::new(move |head, message| match message["method"].as_str() {
            // It was done, and here is where to look.
            Some("tools/call") => respond("303 See Other", "Location: /login\r\n", ""),
            _ if head.starts_with("get /login") => respond(refusal, "", ""),
            _ => well("s1", message),
        });
        let (address, asked) = http_server(answer).await;
        let address = address.replace("http://", "http://user:word@") + "#part";
        let http = sdk::Http::new(address).client(reqwest::Client::new());
        let client =
            Lab::new().stack(Connector::http((), http).on_unauthorized(|_| async { Ok("new".into()) }));
        let error = call(&client, "w_ok").await.unwrap_err();
        assert_eq!((error.outcome(), client.generation()), (Outcome::Unknown, Some(1)), "{error:?}");
        let told = error.get_ref::<sdk::HttpError>().unwrap();
        assert_eq!(told.kind(), sdk::HttpErrorKind::Redirect);
        assert_eq!(asked.lock().unwrap().iter().filter(|asked| *asked == "post tools/call").count(), 1);
        client.shutdown(PATIENCE).await;
    }
}

#[tokio::test]
async fn a_401_without_a_redirect_is_one_also_where_the_address_has_credentials() {
    let answer: Answer = Box::new(|_, message| match message["method"].as_str() {
        Some("tools/call") => respond("401 Unauthorized", "", ""),
        _ => well("s1", message),
    });
    let (address, _) = http_server(answer).await;
    let address = address.replace("http://", "http://user:word@") + "#part";
    let client = Lab::new().stack(Connector::http((), address));
    let error = call(&client, "w_ok").await.unwrap_err();
    assert!(matches!(error.cause(), Cause::Evidence(goaround::Evidence::Unauthorized)), "{error:?}");
    client.shutdown(PATIENCE).await;
}

#[tokio::test]
async fn a_session_that_is_gone_is_not_ended_at_the_server_and_one_that_lives_is() {
    let sessions = Arc::new(Mutex::new(0));
    let answer: Answer = Box::new(move |head, message| {
        let mut sessions = sessions.lock().unwrap();
        if message["method"] == "initialize" {
            *sessions += 1;
        }
        let forgotten = *sessions == 1 && message["method"] == "tools/call";
        if forgotten || head.contains("mcp-session-id: s1") && *sessions > 1 {
            return respond("404 Not Found", "", "");
        }
        well(&format!("s{sessions}"), message)
    });
    let (address, asked) = http_server(answer).await;
    let rules = ToolRules::new().read_only(["ok"]);
    let client = Lab::new().stack(Connector::http((), address).tools(rules));
    assert_eq!(call(&client, "ok").await.unwrap(), "s2");
    client.shutdown(PATIENCE).await;
    let ended = asked.lock().unwrap().iter().filter(|asked| asked.starts_with("delete")).count();
    assert_eq!(ended, 1);
}

/// Its task has its turn late: nobody has withdrawn it when the pipe takes more.
#[tokio::test]
async fn a_write_whose_time_is_up_is_not_begun_with_when_its_turn_comes() {
    let lab = Lab::new();
    let command = lab.command("hold() { sleep 2; result ok; }; large() { result ok; }");
    let rules = ToolRules::new().read_only(["ok", "hold", "large"]);
    let connector = Connector::stdio((), command).tools(rules);
    let client: Client = Stack::builder(connector).deadline(PATIENCE).build().unwrap();
    assert_eq!(call(&client, "ok").await.unwrap(), "ok");

    let call =
        |request: Request, limit| tokio_test::task::spawn(client.clone().oneshot(request.within(limit)));
    let mut hold = call(tool("hold").into(), PATIENCE);
    assert!(hold.poll().is_pending());
    lab.until_asked("hold").await;
    // More than a pipe takes, and the write behind it.
    let arguments = json!({ "of": "x".repeat(1 << 20) });
    let mut large =
        call(tool("large").with_arguments(arguments.as_object().unwrap().clone()).into(), PATIENCE);
    let mut write = call(tool("w_ok").into(), SECOND);
    for calling in [&mut large, &mut write] {
        for _ in 0..5 {
            assert!(calling.poll().is_pending());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
    lab.until_asked("large").await;
    hold.await.unwrap();
    large.await.unwrap();
    let error = write.await.unwrap_err();
    assert!(matches!(error.cause(), Cause::Deadline), "{error:?}");
    assert_eq!(error.outcome(), Outcome::NotDone);
    client.send(Request::from(tool("ok"))).await.unwrap();
    assert_eq!(lab.count("w_ok"), 0);
    client.shutdown(PATIENCE).await;
}
