//! The JSON-RPC client through its public API: peers that misbehave, both directions, and many at once.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use goaround::{
    Call, Cause, Delivery, Event, Refusal, Scope, ServerError, WriteSafetyLayer,
    jsonrpc::{Client, Handler, Notification, Request, Response, ServerRequest},
};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader, DuplexStream, ReadHalf, WriteHalf, split},
    sync::Notify,
};
use tokio_test::{assert_pending, assert_ready_err, assert_ready_ok, task::spawn};
use tower::{Layer, ServiceExt};

/// The peer, played by the test.
struct Peer {
    read: BufReader<ReadHalf<DuplexStream>>,
    write: WriteHalf<DuplexStream>,
}

impl Peer {
    /// The next message.
    async fn next(&mut self) -> Value {
        let mut line = String::new();
        self.read.read_line(&mut line).await.unwrap();
        serde_json::from_str(&line).unwrap()
    }

    async fn send(&mut self, bytes: impl AsRef<[u8]>) {
        self.write.write_all(bytes.as_ref()).await.unwrap();
    }

    /// Sends a message.
    async fn say(&mut self, message: Value) {
        self.send(message.to_string() + "\n").await;
    }
}

fn pair(builder: goaround::jsonrpc::Builder) -> (Client, Peer) {
    let (ours, theirs) = tokio::io::duplex(64 << 10);
    let (read, write) = split(theirs);
    (builder.connect(ours), Peer { read: BufReader::new(read), write })
}

fn request(method: &'static str) -> Request {
    Request::new(method, json!({ "a": 1 })).unwrap()
}

fn answer(id: impl Into<Value>, result: impl Into<Value>) -> Value {
    json!({ "jsonrpc": "2.0", "id": id.into(), "result": result.into() })
}

/// Lets the connection's task do what it can.
async fn settle() {
    for _ in 0..50 {
        tokio::task::yield_now().await;
    }
}

// ----- calls

#[tokio::test]
async fn answers_find_their_calls_in_any_order() {
    let (client, mut peer) = pair(Client::builder());
    let calls: Vec<_> = (0..100).map(|_| client.request(request("m"))).collect();
    let mut ids = Vec::new();
    for _ in 0..100 {
        let call = peer.next().await;
        assert_eq!(
            (&call["method"], &call["params"], &call["jsonrpc"]),
            (&json!("m"), &json!({"a": 1}), &json!("2.0"))
        );
        ids.push(call["id"].as_u64().unwrap());
    }
    for id in ids.iter().rev() {
        peer.say(answer(*id, *id)).await;
    }
    for (call, id) in calls.into_iter().zip(ids) {
        assert_eq!(call.await.unwrap().parse::<u64>().unwrap(), id);
    }
    assert_eq!(client.ignored(), 0);
}

#[tokio::test]
async fn the_servers_error_comes_unchanged() {
    let (client, mut peer) = pair(Client::builder());
    let call = client.request(request("m").read_only());
    let error = json!({ "code": -32000, "message": "quota", "data": { "left": 0 } });
    peer.say(json!({ "jsonrpc": "2.0", "id": 1, "error": error })).await;
    // Before the request was sent, that was the answer to no call.
    settle().await;
    peer.next().await;
    peer.say(json!({ "jsonrpc": "2.0", "id": 1, "error": error })).await;
    let failed = call.await.unwrap_err();
    assert_eq!(failed.answer(), Some(&ServerError::new(-32000, "quota").with_data(json!({ "left": 0 }))));
    assert_eq!((failed.delivery(), failed.method()), (Delivery::Answered, "m"));
    assert_eq!(failed.outcome(), goaround::Outcome::Answered);
}

#[tokio::test]
async fn it_is_a_tower_service() {
    let (client, mut peer) = pair(Client::builder());
    let call = tower::ServiceExt::oneshot(client, request("m"));
    let serve = async {
        let id = peer.next().await["id"].clone();
        peer.say(answer(id, "done")).await;
    };
    let (response, ()) = tokio::join!(call, serve);
    assert_eq!(response.unwrap().parse::<String>().unwrap(), "done");
}

// ----- peers that misbehave

#[tokio::test(start_paused = true)]
async fn what_cannot_be_used_is_ignored_and_never_taken_for_an_answer() {
    let lines: &[&[u8]] = &[
        b"garbage",
        b"\xff\xfe{\"id\":1,\"result\":1}",
        b"{\"id\":1,\"result\":\"\xff\"}",
        br#"{"jsonrpc":"2.0","id":2,"result":"another's"}"#,
        br#"{"jsonrpc":"2.0","id":0,"result":"another's"}"#,
        br#"{"jsonrpc":"2.0","error":{"code":-32700,"message":"no id"}}"#,
        br#"{"jsonrpc":"2.0","id":null,"error":{"code":-32700,"message":"null id"}}"#,
        br#"{"jsonrpc":"2.0","id":1}"#,
        br#"{"jsonrpc":"2.0","id":1,"result":1,"error":{"code":1,"message":""}}"#,
        br#"{"jsonrpc":"2.0","id":1.0,"result":1}"#,
        br#"{"jsonrpc":"2.0","id":-1,"result":1}"#,
        br#"{"jsonrpc":"2.0","id":"01","result":1}"#,
        br#"{"jsonrpc":"2.0","id":"one","result":1}"#,
        br#"{"jsonrpc":"2.0","id":1,"result":1,"result":2}"#,
        br#"{"jsonrpc":"2.0","id":1,"id":2,"result":1}"#,
        br#"{"jsonrpc":"2.0","id":1,"result":"#,
        br#"[[1,null,null,"result"]]"#,
        b"[]",
        b"[",
        b"\0\0\0",
    ];
    for line in lines {
        let (client, mut peer) = pair(Client::builder());
        let mut call = spawn(client.request(request("m")));
        assert_pending!(call.poll());
        peer.next().await;
        peer.send(line).await;
        peer.send("\r\n\r\n").await;
        settle().await;
        assert_pending!(call.poll());
        assert_eq!(client.ignored(), 1, "{}", String::from_utf8_lossy(line));
        // It harmed nothing.
        peer.say(answer(1, "own")).await;
        assert_eq!(call.await.unwrap().parse::<String>().unwrap(), "own");
    }
}

#[tokio::test]
async fn an_id_that_became_a_string_is_known_and_a_second_reply_is_not() {
    let (client, mut peer) = pair(Client::builder());
    let first = client.request(request("m"));
    let second = client.request(request("m"));
    peer.next().await;
    peer.next().await;
    peer.say(answer("1", "first")).await;
    peer.say(answer(1, "again")).await;
    peer.say(json!([answer(7, 7), answer(2, "second"), 3])).await;
    assert_eq!(first.await.unwrap().parse::<String>().unwrap(), "first");
    assert_eq!(second.await.unwrap().parse::<String>().unwrap(), "second");
    assert_eq!(client.ignored(), 3);
}

#[tokio::test]
async fn null_is_a_result() {
    let (client, mut peer) = pair(Client::builder());
    let call = client.request(request("m"));
    peer.next().await;
    peer.say(answer(1, Value::Null)).await;
    assert_eq!(call.await.unwrap().raw().get(), "null");
}

#[tokio::test(start_paused = true)]
async fn an_answer_above_the_limit_ends_its_call_at_once_and_nothing_else() {
    let (client, mut peer) = pair(Client::builder().max_line(100));
    for id_first in [true, false] {
        let mut large = spawn(client.request(request("large")));
        let mut small = spawn(client.request(request("small")));
        assert_pending!(large.poll());
        assert_pending!(small.poll());
        let id = peer.next().await["id"].as_u64().unwrap();
        peer.next().await;
        let pad = "x".repeat(200);
        if id_first {
            peer.send(format!(r#"{{"id":{id},"result":{{"id":{},"pad":"{pad}"#, id + 1)).await;
        } else {
            peer.send(format!(r#"{{"result":{{"id":{},"pad":"{pad}"}},"id":{id},"#, id + 1)).await;
        }
        settle().await;
        assert!(large.is_woken());
        let error = assert_ready_err!(large.poll());
        assert!(matches!(error.cause(), Cause::AnswerTooLarge { limit: 100 }));
        assert_eq!((error.delivery(), error.scope()), (Delivery::Answered, Scope::Call));
        assert!(error.may_have_landed() && !error.is_safe_to_repeat());
        assert!(error.to_string().ends_with("verify before repeating"), "{error}");
        peer.send(if id_first { "\"}}\n" } else { "\"jsonrpc\":\"2.0\"}\n" }).await;
        peer.say(answer(id + 1, 1)).await;
        settle().await;
        assert_ready_ok!(small.poll());
        assert_eq!(client.ignored(), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn a_write_whose_answer_cannot_be_read_is_reported() {
    let (client, mut peer) = pair(Client::builder().max_line(100));
    let seen = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&seen);
    let layer = WriteSafetyLayer::refuse().on_event(move |event| {
        assert!(matches!(event, Event::InDoubt(_)));
        counter.fetch_add(1, Ordering::Relaxed);
    });
    let mut call = spawn(layer.layer(client).oneshot(request("pay")));
    assert_pending!(call.poll());
    let id = peer.next().await["id"].clone();
    peer.say(answer(id, "x".repeat(200))).await;
    settle().await;
    assert_ready_err!(call.poll());
    assert_eq!(seen.load(Ordering::Relaxed), 1);
}

#[tokio::test]
async fn a_whole_answer_without_its_newline_at_the_end_is_one_and_half_of_one_is_not() {
    for (text, is_answer) in [(r#"{"id":1,"result":1}"#, true), (r#"{"id":1,"result":1"#, false)] {
        let (client, mut peer) = pair(Client::builder());
        let call = client.request(request("m"));
        peer.next().await;
        peer.send(text).await;
        drop(peer);
        match call.await {
            Ok(_) => assert!(is_answer),
            Err(error) => {
                assert!(!is_answer);
                assert_eq!((error.delivery(), error.scope()), (Delivery::Ambiguous, Scope::Connection));
            }
        }
    }
}

#[tokio::test]
async fn an_end_of_input_ends_all_calls_though_the_peer_goes_on_reading() {
    let (client, mut peer) = pair(Client::builder());
    let calls: Vec<_> = (0..1000).map(|_| client.request(request("m"))).collect();
    for _ in 0..1000 {
        peer.next().await;
    }
    peer.write.shutdown().await.unwrap();
    let closure = client.closed().await;
    assert_eq!(closure.in_flight(), 1000);
    for call in calls {
        let error = call.await.unwrap_err();
        assert_eq!((error.delivery(), error.scope()), (Delivery::Ambiguous, Scope::Connection));
    }
    assert_eq!(client.closure().unwrap().to_string(), closure.to_string());
}

#[tokio::test(start_paused = true)]
async fn a_large_request_to_a_peer_that_stops_reading_holds_up_nobody_beyond_his_deadline() {
    let (client, mut peer) = pair(Client::builder().exact_writes());
    let large = Request::new("large", ["x".repeat(1 << 20)]).unwrap();
    let mut large = spawn(client.request(large));
    assert_pending!(large.poll());
    settle().await;
    let mut small = spawn(client.request(request("small").within(Duration::from_secs(1))));
    assert_pending!(small.poll());
    settle().await;
    tokio::time::advance(Duration::from_secs(1)).await;
    assert_eq!(assert_ready_err!(small.poll()).delivery(), Delivery::NotSent);
    // Killed, with half of the large request in its pipe.
    let mut half = vec![0; 1 << 19];
    peer.read.read_exact(&mut half).await.unwrap();
    drop(peer);
    let error = large.await.unwrap_err();
    assert_eq!((error.delivery(), error.scope()), (Delivery::NotProcessed, Scope::Connection));
}

#[tokio::test]
async fn large_messages_pass_in_both_directions() {
    let (client, mut peer) = pair(Client::builder());
    let text = "y".repeat(3 << 20);
    let call = client.request(Request::new("large", [&text]).unwrap());
    let serve = async {
        let call = peer.next().await;
        peer.say(answer(call["id"].clone(), call["params"][0].clone())).await;
    };
    let (response, ()) = tokio::join!(call, serve);
    assert_eq!(response.unwrap().parse::<String>().unwrap(), text);
}

#[tokio::test(start_paused = true)]
async fn a_flood_of_requests_from_a_peer_that_reads_nothing_is_bounded() {
    let (ours, theirs) = tokio::io::duplex(1 << 10);
    let client = Client::new(ours);
    let (read, mut write) = split(theirs);
    for id in 0..5000 {
        write.write_all(format!("{{\"id\":{id},\"method\":\"ask\"}}\n").as_bytes()).await.unwrap();
    }
    settle().await;
    assert!(client.ignored() > 3000);
    // It is still there for what matters.
    let call = client.request(request("m"));
    let mut lines = BufReader::new(read).lines();
    loop {
        let line: Value = serde_json::from_str(&lines.next_line().await.unwrap().unwrap()).unwrap();
        if line["method"] == "m" {
            write.write_all((answer(line["id"].clone(), 1).to_string() + "\n").as_bytes()).await.unwrap();
            break;
        }
        assert_eq!(line["error"]["code"], -32601);
    }
    call.await.unwrap();
}

// ----- the other direction

#[derive(Default)]
struct Served {
    running: AtomicUsize,
    go: Notify,
    told: Mutex<Vec<String>>,
}

impl Handler for Served {
    async fn request(&self, request: ServerRequest) -> Result<Response, ServerError> {
        match request.method() {
            "add" => {
                let [a, b]: [i64; 2] =
                    request.params().map_err(|_| ServerError::new(-32602, "two numbers"))?;
                Response::new(a + b).map_err(|_| ServerError::new(-32603, ""))
            }
            "wait" => {
                self.running.fetch_add(1, Ordering::Relaxed);
                let _running = OnDrop(|| {
                    self.running.fetch_sub(1, Ordering::Relaxed);
                });
                self.go.notified().await;
                Response::new(()).map_err(|_| ServerError::new(-32603, ""))
            }
            "panic" => panic!("as tested"),
            _ => Err(ServerError::new(-32601, "unknown")),
        }
    }

    fn notification(&self, notification: Notification) {
        self.told.lock().unwrap().push(notification.method().to_owned());
        assert_ne!(notification.method(), "panic", "as tested");
    }
}

struct OnDrop<F: FnMut()>(F);

impl<F: FnMut()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

#[tokio::test]
async fn requests_of_the_peer_are_answered() {
    let served = Arc::new(Served::default());
    let (client, mut peer) = pair(Client::builder().handler(served.clone()));
    for (message, reply) in [
        (json!({"id": "a", "method": "add", "params": [1, 2]}), answer("a", 3)),
        (
            json!({"id": 1, "method": "add"}),
            json!({"jsonrpc": "2.0", "id": 1, "error": {"code": -32602, "message": "two numbers"}}),
        ),
        (
            json!({"id": 2, "method": "panic"}),
            json!({"jsonrpc": "2.0", "id": 2, "error": {"code": -32603, "message": "the request's handler failed"}}),
        ),
        (
            json!([{"id": 3, "method": "other"}, {"method": "panic"}, {"method": "told"}]),
            json!({"jsonrpc": "2.0", "id": 3, "error": {"code": -32601, "message": "unknown"}}),
        ),
    ] {
        peer.say(message).await;
        assert_eq!(peer.next().await, reply);
    }
    assert_eq!(*served.told.lock().unwrap(), ["panic", "told"]);
    // A call of ours with the same id as one of the peer's.
    let call = client.request(request("m"));
    assert_eq!(peer.next().await["id"], 1);
    peer.say(answer(1, 1)).await;
    call.await.unwrap();
    assert_eq!(client.ignored(), 0);
}

#[tokio::test]
async fn without_a_handler_no_method_is_found() {
    let (client, mut peer) = pair(Client::builder());
    peer.say(json!({"method": "told"})).await;
    peer.say(json!({"id": "x", "method": "ask"})).await;
    let reply = peer.next().await;
    assert_eq!((&reply["id"], &reply["error"]["code"]), (&json!("x"), &json!(-32601)));
    assert_eq!(client.ignored(), 0);
    let (_client, mut peer) = pair(Client::builder().handler(()));
    peer.say(json!({"id": "x", "method": "ask"})).await;
    assert_eq!(peer.next().await["error"]["code"], -32601);
}

#[tokio::test(start_paused = true)]
async fn the_peers_requests_are_bounded_and_end_with_the_connection() {
    let served = Arc::new(Served::default());
    let (client, mut peer) = pair(Client::builder().handler(served.clone()));
    for id in 0..65 {
        peer.say(json!({"id": id, "method": "wait"})).await;
    }
    settle().await;
    assert_eq!(served.running.load(Ordering::Relaxed), 64);
    let refused = peer.next().await;
    assert_eq!((&refused["id"], &refused["error"]["code"]), (&json!(64), &json!(-32603)));
    served.go.notify_one();
    let answered = peer.next().await;
    assert_eq!(answered["result"], Value::Null);
    settle().await;
    assert_eq!(served.running.load(Ordering::Relaxed), 63);
    client.close();
    settle().await;
    assert_eq!(served.running.load(Ordering::Relaxed), 0);
}

// ----- bounds and configuration

#[tokio::test]
async fn calls_in_flight_are_bounded() {
    let (client, mut peer) = pair(Client::builder().max_in_flight(1));
    let mut first = client.request(request("m"));
    let refused = client.request(request("m")).await.unwrap_err();
    assert!(matches!(refused.cause(), Cause::Refused(Refusal::Overloaded(_))));
    assert_eq!(refused.delivery(), Delivery::NotSent);
    for _ in 0..100 {
        let id = peer.next().await["id"].clone();
        peer.say(answer(id, 1)).await;
        first.await.unwrap();
        first = client.request(request("m"));
    }
    // What is dropped is in flight no more, once the connection knows.
    peer.next().await;
    drop(first);
    assert_eq!(peer.next().await["method"], "notifications/cancelled");
    client.notify("told", json!({})).await.unwrap();
}

#[tokio::test]
async fn wrong_values_refuse_each_call_by_name() {
    for (builder, name) in [
        (Client::builder().max_line(0), "max_line"),
        (Client::builder().max_in_flight(0), "max_in_flight"),
        (Client::builder().probe(request("ping"), Duration::ZERO), "probe"),
    ] {
        let (mut client, _peer) = pair(builder);
        std::future::poll_fn(|cx| tower::Service::poll_ready(&mut client, cx)).await.unwrap();
        for _ in 0..2 {
            let error = client.request(request("m")).await.unwrap_err();
            let Cause::Refused(Refusal::Config(what)) = error.cause() else { panic!("{error:?}") };
            assert!(what.contains(name), "{what}");
        }
        assert!(client.notify("told", ()).await.is_err());
        client.close();
        client.closed().await;
    }
    let (client, mut peer) = pair(
        Client::builder()
            .max_line(usize::MAX)
            .max_in_flight(usize::MAX)
            .probe(request("ping"), Duration::MAX),
    );
    let call = client.request(request("m"));
    peer.next().await;
    peer.say(answer(1, 1)).await;
    call.await.unwrap();
    let error = client.notify("told", 1).await.unwrap_err();
    assert_eq!(error.delivery(), Delivery::NotSent);
}

// ----- many at once

/// A server that notes what it gets and answers all of it, until it has had enough.
async fn serve(mut peer: Peer, enough: usize, got: Arc<Mutex<Vec<u64>>>) {
    let mut line = String::new();
    for _ in 0..enough {
        line.clear();
        if peer.read.read_line(&mut line).await.unwrap_or(0) == 0 {
            return;
        }
        let message: Value = serde_json::from_str(&line).unwrap();
        let Some(number) = message["params"][0].as_u64() else { continue };
        got.lock().unwrap().push(number);
        let reply = answer(message["id"].clone(), number).to_string() + "\n";
        if peer.write.write_all(reply.as_bytes()).await.is_err() {
            return;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn under_load_not_sent_is_never_said_of_what_arrived_and_answers_are_never_mixed_up() {
    for round in 0..20_u64 {
        let got = Arc::new(Mutex::new(Vec::new()));
        let (ours, theirs) = tokio::io::duplex(512);
        let (read, write) = split(theirs);
        let peer = Peer { read: BufReader::new(read), write };
        let server = tokio::spawn(serve(peer, 300 + 10 * round as usize, got.clone()));
        let client = Client::builder().exact_writes().connect(ours);
        let callers: Vec<_> = (0..4_u64)
            .map(|caller| {
                let client = client.clone();
                tokio::spawn(async move {
                    let (mut not_sent, mut answered) = (Vec::new(), 0);
                    for sequence in 0..200 {
                        let number = round * 1_000_000 + caller * 1000 + sequence;
                        let call = client.request(Request::new("m", [number]).unwrap());
                        if sequence % 7 == 0 {
                            // Dropped at any moment.
                            tokio::task::yield_now().await;
                            drop(call);
                            continue;
                        }
                        match call.await {
                            Ok(response) => {
                                assert_eq!(response.parse::<u64>().unwrap(), number);
                                answered += 1;
                            }
                            Err(error) => match error.delivery() {
                                Delivery::NotSent | Delivery::NotProcessed => not_sent.push(number),
                                delivery => assert_eq!(delivery, Delivery::Ambiguous),
                            },
                        }
                    }
                    (not_sent, answered)
                })
            })
            .collect();
        let mut total = 0;
        let mut not_sent = Vec::new();
        for caller in callers {
            let (more, answered) = caller.await.unwrap();
            not_sent.extend(more);
            total += answered;
        }
        server.await.unwrap();
        let got = got.lock().unwrap();
        assert!(total > 0 && !not_sent.is_empty());
        assert!(not_sent.iter().all(|number| !got.contains(number)));
    }
}
