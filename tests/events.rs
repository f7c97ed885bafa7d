//! What goes to `tracing` without anybody asking for it, and what never does.

use std::{
    io,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use goaround::{BoxError, Call, Effect, InDoubt, Outcome, Stack, jsonrpc};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tower::service_fn;

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Log {
    fn lines(&self) -> Vec<String> {
        let log = String::from_utf8(self.0.lock().unwrap().clone()).unwrap();
        log.lines().map(str::to_owned).collect()
    }
}

/// Closes after each request that it reads on its first two connections, then answers all of them.
async fn serve(nth: u32, pipe: tokio::io::DuplexStream) {
    let (read, mut write) = tokio::io::split(pipe);
    let mut lines = BufReader::new(read).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        if nth <= 2 {
            return;
        }
        let request: Value = serde_json::from_str(&line).unwrap();
        let answer = json!({ "jsonrpc": "2.0", "id": request["id"], "result": "hunter2-result" });
        write.write_all(format!("{answer}\n").as_bytes()).await.unwrap();
    }
}

fn stack(
    told: &Arc<Mutex<Vec<Value>>>,
) -> Stack<
    impl tower::Service<(), Response = jsonrpc::Client, Error = BoxError, Future: Send> + Send + use<>,
    jsonrpc::Request,
    jsonrpc::Response,
> {
    let (connects, told) = (AtomicU32::new(0), Arc::clone(told));
    let connector = service_fn(move |()| {
        let (ours, theirs) = tokio::io::duplex(1 << 16);
        tokio::spawn(serve(connects.fetch_add(1, Ordering::Relaxed) + 1, theirs));
        std::future::ready(Ok::<_, BoxError>(jsonrpc::Client::new(ours)))
    });
    Stack::builder(connector)
        .deadline(Duration::from_secs(30))
        .check(|doubt: InDoubt<jsonrpc::Request, jsonrpc::Response>| async move {
            Ok(doubt.unknown("nobody knows"))
        })
        .on_event(move |event| told.lock().unwrap().push(serde_json::to_value(event).unwrap()))
        .build()
        .unwrap()
}

#[tokio::test(start_paused = true)]
async fn the_first_message_that_is_no_json_rpc_is_a_warning_without_its_text_and_the_next_ones_are_none() {
    use tokio::io::AsyncWriteExt;

    let log = Log::default();
    let sink = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::WARN)
        .with_ansi(false)
        .without_time()
        .with_writer(move || sink.clone())
        .finish();
    let _guard = tracing::subscriber::set_default(subscriber);
    let (ours, mut theirs) = tokio::io::duplex(1 << 16);
    let client = jsonrpc::Client::new(ours);
    theirs
        .write_all(b"{\"jsonrpc\":\"2.0\",\"id\":7,\"result\":1}\ntoken=hunter2\n{ hunter2\n")
        .await
        .unwrap();
    while client.ignored() < 3 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let lines = log.lines();
    assert_eq!(lines.len(), 1, "{lines:#?}");
    assert!(lines[0].contains(" WARN goaround: ") && lines[0].contains("is not all JSON-RPC"), "{lines:#?}");
}

#[tokio::test(start_paused = true)]
async fn every_event_goes_to_tracing_too_and_no_argument_or_result_is_in_one() {
    let log = Log::default();
    let sink = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::DEBUG)
        .with_ansi(false)
        .without_time()
        .with_writer(move || sink.clone())
        .finish();
    // The runtime is this thread.
    let _guard = tracing::subscriber::set_default(subscriber);
    let told = Arc::new(Mutex::new(Vec::new()));
    let stack = stack(&told);
    let call = |effect| {
        jsonrpc::Request::new("work", json!({ "token": "hunter2-argument" })).unwrap().as_effect(effect)
    };
    let error = stack.send(call(Effect::Write)).await.unwrap_err();
    assert_eq!(error.outcome(), Outcome::Unknown);
    stack.send(call(Effect::ReadOnly)).await.unwrap();
    stack.shutdown(Duration::ZERO).await;

    let told = told.lock().unwrap();
    let names: Vec<_> = told.iter().map(|event| event["event"].as_str().unwrap()).collect();
    assert_eq!(names, ["in_doubt", "incident", "incident", "recovery", "call"]);
    let lines = log.lines();
    for (count, what) in
        [(1, "write in doubt"), (2, "connection closed"), (1, "recovered"), (1, "call answered")]
    {
        let found = lines.iter().filter(|line| line.contains(" goaround: ") && line.contains(what)).count();
        assert_eq!(found, count, "{what}: {lines:#?}");
    }
    assert!(!lines.concat().contains("hunter2"), "{lines:#?}");
    assert!(!serde_json::to_string(&*told).unwrap().contains("hunter2"), "{told:#?}");
    assert!(!format!("{error} {error:?}").contains("hunter2"));
}
