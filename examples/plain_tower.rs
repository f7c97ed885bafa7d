//! A plain Tower client with its own request and error types: only the deadline and the retry layer.
//!
//! `cargo run --example plain_tower`

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use goaround::{BoxError, Call, CallError, DeadlineLayer, Effect, Event, RetryReadOnly, Tagged};
use tower::{ServiceBuilder, ServiceExt, retry::budget::TpsBudget, service_fn};

#[derive(Clone, Debug)]
struct Req {
    verb: &'static str,
    path: &'static str,
}

#[derive(Debug)]
struct Res(&'static str);

#[derive(Debug)]
enum MyErr {
    Connect,
    Reset,
    Busy(Duration),
    App(u16),
}

impl fmt::Display for MyErr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self:?}")
    }
}

impl std::error::Error for MyErr {}

fn effect(request: &Req) -> Effect {
    if request.verb == "GET" { Effect::ReadOnly } else { Effect::Write }
}

fn classify(error: MyErr) -> CallError {
    match error {
        MyErr::Connect => CallError::not_sent(error).connection_lost(),
        MyErr::Busy(after) => CallError::not_processed(error).after(after),
        MyErr::App(_) => CallError::answered(error),
        MyErr::Reset => CallError::ambiguous(error),
    }
}

/// A server that is in trouble: each path fails in its own way, some only at first.
async fn server(request: Req, nth: u32) -> Result<Res, MyErr> {
    match (request.path, nth) {
        ("/down", _) | ("/flaky", 0) => Err(MyErr::Connect),
        ("/busy", 0) => Err(MyErr::Busy(Duration::from_millis(200))),
        ("/flaky", 1) | ("/pay", _) => Err(MyErr::Reset),
        ("/missing", _) => Err(MyErr::App(404)),
        ("/hang", _) => std::future::pending().await,
        (path, _) => Ok(Res(path)),
    }
}

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    let calls = Arc::new(AtomicU32::new(0));
    let counter = calls.clone();
    let inner = service_fn(move |request: Req| server(request, counter.fetch_add(1, Ordering::Relaxed)));
    let client = ServiceBuilder::new()
        .map_request(|request: Req| Tagged::by(request, effect).within(Duration::from_secs(1)))
        .layer(DeadlineLayer::new(Duration::from_secs(10)).on_event(|event| {
            if let Event::Call(report) = event {
                // No outcome is a success: an `Outcome` is what an error knows.
                let ended = report.outcome.map_or("answered".into(), |outcome| format!("{outcome:?}"));
                println!("      event: {} attempts, {ended}", report.attempts.len());
            }
        }))
        .layer(RetryReadOnly)
        .map_request(Tagged::into_inner)
        .map_err(classify)
        .service(inner);

    for (verb, path) in [
        ("GET", "/orders"),
        ("GET", "/flaky"),
        ("GET", "/busy"),
        ("GET", "/missing"),
        ("GET", "/down"),
        ("GET", "/hang"),
        ("POST", "/pay"),
    ] {
        calls.store(0, Ordering::Relaxed);
        let result = client.clone().oneshot(Req { verb, path }).await;
        print!("{verb:4} {path:8} called {} times: ", calls.load(Ordering::Relaxed));
        match result {
            Ok(Res(answer)) => println!("answer {answer:?}"),
            // The server's answer stands for itself. Of everything else the text says what is known.
            Err(error) => match error.into_answer::<MyErr>() {
                Ok(MyErr::App(code)) => println!("own error, code {code}"),
                Ok(own) => println!("own error: {own}"),
                Err(error) => match error.get_ref::<MyErr>() {
                    Some(own) => println!("{error}\n      own error: {own}"),
                    None => println!("{error}"),
                },
            },
        }
    }

    // Any budget of tower's, shared by several clients.
    let budget = Arc::new(TpsBudget::default());
    let _ = [RetryReadOnly.budget(budget.clone()), RetryReadOnly.budget(budget)];

    // Behind tower's buffer, whose errors come in boxes: a `CallError` in one is found and kept.
    let buffered = ServiceBuilder::new()
        .layer(RetryReadOnly)
        .map_err(CallError::from_boxed)
        .buffer(8)
        .map_request(Tagged::into_inner)
        .map_err(classify)
        .service(service_fn(|request: Req| server(request, 0)));
    let Res(answer) = buffered.oneshot(Tagged::by(Req { verb: "GET", path: "/buffered" }, effect)).await?;
    println!("buffered: answer {answer:?}");
    Ok(())
}
