//! Does a number of calls and nothing else, for `scripts/instructions`, which counts the machine's instructions
//! for each. `cargo bench --bench instructions -- ready_read 1000`.

use std::{
    future::{Ready, ready},
    hint::black_box,
    pin::pin,
    task::{Context, Poll, Waker},
    time::Duration,
};

use goaround::{
    BoxError, CallError, Effect, InDoubt, Stack, Tagged, Verdict,
    jsonrpc::{Client, Request},
};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, duplex, split};
use tower::{Service, service_fn};

/// Answers at once.
#[derive(Clone)]
struct Echo;

impl Service<Tagged<u64>> for Echo {
    type Response = u64;
    type Error = CallError;
    type Future = Ready<Result<u64, CallError>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), CallError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Tagged<u64>) -> Self::Future {
        ready(Ok(*request))
    }
}

/// Calls through the whole stack, with a check configured, around a service that is ready at once.
fn ready_calls(calls: u64, effect: Effect) {
    let connector = service_fn(|()| ready(Ok::<_, CallError>(Echo)));
    let check =
        |doubt: InDoubt<Tagged<u64>, u64>| async move { Ok::<Verdict<u64>, BoxError>(doubt.unknown("")) };
    let stack = Stack::builder(connector).deadline(Duration::from_secs(30)).check(check);
    let mut stack = stack.build().expect("a stack");
    let mut cx = Context::from_waker(Waker::noop());
    for n in 0..calls {
        assert!(matches!(stack.poll_ready(&mut cx), Poll::Ready(Ok(()))));
        let call = pin!(stack.call(Tagged::new(n, effect)));
        let Poll::Ready(Ok(answer)) = call.poll(&mut cx) else { panic!("it is ready at once") };
        black_box(answer);
    }
}

/// Round trips of the JSON-RPC client, one after the other, with a server in the same thread.
async fn round_trip(calls: u64) {
    let (ours, theirs) = duplex(64 << 10);
    tokio::spawn(async move {
        let (read, mut write) = split(theirs);
        let mut lines = BufReader::new(read).lines();
        while let Ok(Some(line)) = lines.next_line().await {
            // As little as a server can do: the id is the only number at the top that is not quoted.
            let Some(id) = line.split("\"id\":").nth(1).and_then(|rest| rest.split([',', '}']).next()) else {
                continue;
            };
            let answer = format!("{{\"jsonrpc\":\"2.0\",\"id\":{id},\"result\":{{\"ok\":true}}}}\n");
            if write.write_all(answer.as_bytes()).await.is_err() {
                return;
            }
        }
    });
    let client = Client::new(ours);
    let request = Request::new("echo", serde_json::json!({ "text": "x".repeat(100) })).expect("JSON");
    for _ in 0..calls {
        black_box(client.request(request.clone()).await.expect("an answer"));
    }
}

fn main() {
    let mut args = std::env::args().skip(1).filter(|arg| !arg.starts_with("--"));
    let (what, calls) = (args.next().unwrap_or_default(), args.next().and_then(|calls| calls.parse().ok()));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    match (what.as_str(), calls) {
        ("ready_read", Some(calls)) => {
            let _in_runtime = runtime.enter();
            ready_calls(calls, Effect::ReadOnly);
        }
        ("ready_write", Some(calls)) => {
            let _in_runtime = runtime.enter();
            ready_calls(calls, Effect::Write);
        }
        ("round_trip", Some(calls)) => runtime.block_on(round_trip(calls)),
        _ => println!(
            "usage: ready_read | ready_write | round_trip, and how many calls; see scripts/instructions"
        ),
    }
}
