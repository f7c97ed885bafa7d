//! Tools whose calls become tasks, in both eras: whole stacks over scripted servers.

use super::{
    ProtocolVersion::{V2025_11_25, V2026_07_28},
    *,
};
use crate::{
    Deadline, Event,
    mcp::tasks::{self, Reason, Started, Status, Task, Unfinished},
};

const ERAS: [ProtocolVersion; 2] = [V2025_11_25, V2026_07_28];
const CREATED: &str = "2026-11-30T00:00:00Z";
const MINUTE: Duration = Duration::from_secs(60);

type Connector = BoxCloneService<(), Connection, BoxError>;
type Bare = Stack<Connector, Request, Response>;
type Seen = Arc<Mutex<Vec<(&'static str, Effect, Option<Outcome>)>>>;

/// A stack without any rules, and its events.
fn stack(lab: &Lab) -> (Arc<Bare>, Seen) {
    classified(lab, None)
}

fn classified(lab: &Lab, of_tools: Option<Effect>) -> (Arc<Bare>, Seen) {
    let (tell, settings, memory) = (lab.tell.clone(), Arc::new(lab.settings.clone()), lab.memory.clone());
    let connector = service_fn(move |()| connect(Wire(tell.clone()), settings.clone(), memory.clone()));
    let seen = Seen::default();
    let sink = seen.clone();
    let stack = Stack::builder(BoxCloneService::new(connector))
        .deadline(MINUTE)
        .classify(move |request: &Request| of_tools.filter(|_| request.method() == "tools/call"))
        .on_event(move |event| {
            sink.lock().unwrap().push(match event {
                Event::InDoubt(report) => ("in doubt", report.effect, report.outcome),
                Event::Abandoned(report) => ("abandoned", report.effect, report.outcome),
                _ => return,
            });
        });
    (Arc::new(stack.build().unwrap()), seen)
}

fn call() -> Request {
    tasks::asked(tool("render"), Duration::from_secs(3600)).unwrap()
}

type Running = JoinHandle<Result<Response, CallError>>;

fn run(stack: &Arc<Bare>, request: Request) -> Running {
    let stack = stack.clone();
    tokio::spawn(async move { tasks::run(&*stack, request).await })
}

fn resume(stack: &Arc<Bare>, task: &Task) -> Running {
    let (stack, task) = (stack.clone(), task.clone());
    tokio::spawn(async move { tasks::resume(&*stack, &task, Deadline::Inherit).await })
}

/// The next server, shaken hands with.
async fn next(lab: &mut Lab, version: ProtocolVersion) -> Server {
    let mut server = lab.server().await;
    match version.has_handshake() {
        true => drop(server.older(version.as_str()).await),
        false => drop(server.modern().await),
    }
    server
}

fn status(version: ProtocolVersion, status: &str, interval: Value) -> Value {
    match version.has_handshake() {
        true => json!({
            "taskId": "t-1", "status": status, "ttl": 3_600_000, "pollInterval": interval, "createdAt": CREATED,
        }),
        false => json!({
            "resultType": "complete", "taskId": "t-1", "status": status, "ttlMs": null,
            "pollIntervalMs": interval, "createdAt": CREATED,
        }),
    }
}

fn created(version: ProtocolVersion, interval: Value) -> Value {
    let mut task = status(version, "working", interval);
    match version.has_handshake() {
        true => json!({ "task": task }),
        false => {
            task["resultType"] = json!("task");
            task
        }
    }
}

impl Server {
    /// The next request that is no probe of a new connection; it must be of that method.
    async fn wanted(&mut self, method: &str) -> Value {
        loop {
            let message = self.read().await.unwrap();
            match message["method"].as_str() {
                Some("ping") => self.answer(&message, json!({})).await,
                Some("server/discover") => self.answer(&message, discovered()).await,
                got => {
                    assert_eq!(got, Some(method), "{message}");
                    return message;
                }
            }
        }
    }

    /// The tool is not called again, and the task is left alone.
    async fn is_left_alone(&mut self) {
        let message = timeout(MINUTE, self.wanted("")).await;
        assert!(message.is_err(), "{message:?}");
    }

    /// Answers the tool's call with a task.
    async fn makes_a_task(&mut self, version: ProtocolVersion, interval: Value) {
        let asked = self.wanted("tools/call").await;
        assert_eq!(asked["params"]["name"], "render");
        assert_eq!(asked["params"]["task"], json!({ "ttl": 3_600_000 }));
        self.answer(&asked, created(version, interval)).await;
    }

    /// The next question for the status.
    async fn polled(&mut self) -> Value {
        let asked = self.wanted("tasks/get").await;
        assert_eq!(asked["params"]["taskId"], "t-1");
        asked
    }

    async fn says(&mut self, version: ProtocolVersion, of: &str) {
        let asked = self.polled().await;
        self.answer(&asked, status(version, of, json!(2000))).await;
    }

    /// Says that the task has ended, and hands out its result.
    async fn completes(&mut self, version: ProtocolVersion, result: Value) {
        let asked = self.polled().await;
        let mut done = status(version, "completed", json!(2000));
        if version.has_handshake() {
            self.answer(&asked, done).await;
            let asked = self.wanted("tasks/result").await;
            assert_eq!(asked["params"], json!({ "taskId": "t-1" }));
            self.answer(&asked, result).await;
        } else {
            done["result"] = result;
            self.answer(&asked, done).await;
        }
    }
}

fn result() -> Value {
    json!({ "content": [{ "type": "text", "text": "done" }] })
}

async fn ok(running: Running) -> Value {
    running.await.unwrap().unwrap().parse().unwrap()
}

/// Unknown, for that reason, with the task.
async fn unfinished(running: Running, reason: Reason) -> (CallError, Task) {
    let error = running.await.unwrap().unwrap_err();
    let unfinished = Unfinished::of(&error).unwrap_or_else(|| panic!("{error}"));
    assert_eq!(unfinished.reason(), reason, "{error}");
    let task = unfinished.task().clone();
    assert_eq!(task.id(), "t-1");
    assert!(!format!("{error} {error:?} {unfinished:?}").contains("t-1"), "{error:?}");
    (error, task)
}

fn assert_unknown(error: &CallError) {
    assert_eq!((error.outcome(), error.method()), (Outcome::Unknown, "tools/call"), "{error}");
    assert!(error.may_have_landed() && !error.is_safe_to_repeat());
    assert!(error.to_string().starts_with("outcome UNKNOWN: tools/call: "), "{error}");
}

const UNKNOWN: (&str, Effect, Option<Outcome>) = ("in doubt", Effect::Write, Some(Outcome::Unknown));

#[tokio::test(start_paused = true)]
async fn a_call_that_is_answered_at_once_is_no_task() {
    for (version, answer) in [
        (V2025_11_25, result()),
        (V2025_11_25, json!({ "content": [], "task": { "taskId": "x", "status": "working" } })),
        (V2025_11_25, json!({ "task": 7 })),
        (V2025_11_25, json!([])),
        (V2026_07_28, json!({ "resultType": "complete", "content": [], "taskId": "x" })),
        (V2026_07_28, json!({ "resultType": "task" })),
    ] {
        let mut lab = Lab::new();
        let (stack, _) = stack(&lab);
        let running = run(&stack, tool("render"));
        let mut server = next(&mut lab, version).await;
        let asked = server.asked("tools/call").await;
        server.answer(&asked, answer.clone()).await;
        assert_eq!(ok(running).await, answer);
        server.is_left_alone().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_result_is_fetched_once_it_is_there_and_the_status_asked_for_at_the_servers_pace() {
    for version in ERAS {
        // The default, what is honoured, and the bounds.
        for (wish, seconds) in [
            (Value::Null, 1.0),
            (json!("x"), 1.0),
            (json!(-5), 1.0),
            (json!(7500), 7.5),
            (json!(0), 0.1),
            (json!(1e300), 60.0),
        ] {
            let mut lab = Lab::new();
            let (stack, seen) = stack(&lab);
            let running = run(&stack, call().within(MINUTE * 10));
            let mut server = next(&mut lab, version).await;
            server.makes_a_task(version, wish.clone()).await;
            let mut began = Instant::now();
            // It is the latest wish that counts.
            for (seconds, next) in [(seconds, wish.clone()), (seconds, json!(2000)), (2.0, Value::Null)] {
                let asked = server.polled().await;
                let took = began.elapsed().as_secs_f64();
                assert!((took - seconds).abs() < 0.01, "{wish}: {took} is not {seconds}");
                began = Instant::now();
                server.answer(&asked, status(version, "working", next)).await;
            }
            server.completes(version, result()).await;
            assert_eq!(ok(running).await, result());
            assert!(seen.lock().unwrap().is_empty());
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_task_outlives_its_connection_and_the_tool_runs_once() {
    for version in ERAS {
        let mut lab = Lab::new();
        let (stack, seen) = stack(&lab);
        let running = run(&stack, call());
        let mut server = next(&mut lab, version).await;
        server.makes_a_task(version, json!(1000)).await;
        server.says(version, "working").await;
        // While it is asked, and while nobody asks.
        server.polled().await;
        drop(server);
        let mut server = next(&mut lab, version).await;
        server.says(version, "working").await;
        drop(server);
        let mut server = next(&mut lab, version).await;
        server.says(version, "working").await;
        server.completes(version, result()).await;
        assert_eq!(ok(running).await, result());
        assert_eq!(stack.generation(), Some(3));
        assert!(seen.lock().unwrap().is_empty());
    }
}

#[tokio::test(start_paused = true)]
async fn the_result_too_is_asked_for_again_over_the_next_connection() {
    let mut lab = Lab::new();
    let (stack, _) = stack(&lab);
    let running = run(&stack, call());
    let mut server = next(&mut lab, V2025_11_25).await;
    server.makes_a_task(V2025_11_25, json!(1000)).await;
    server.says(V2025_11_25, "completed").await;
    server.wanted("tasks/result").await;
    drop(server);
    let mut server = next(&mut lab, V2025_11_25).await;
    // It is still that task's.
    server.completes(V2025_11_25, result()).await;
    assert_eq!(ok(running).await, result());
}

/// A status as another process may tell it: of a task that was created at another time, or at none that it says.
fn of_another(mut status: Value, created: &Value) -> Value {
    let task = match status.get_mut("task") {
        Some(task) => task,
        None => &mut status,
    };
    match created {
        Value::Null => drop(task.as_object_mut().unwrap().remove("createdAt")),
        created => task["createdAt"] = created.clone(),
    }
    status
}

#[tokio::test(start_paused = true)]
async fn a_task_of_the_next_process_that_has_the_same_id_is_another_ones() {
    let other = || json!("2026-11-30T00:00:01Z");
    for version in ERAS {
        // Whether the first process said when, and whether the next one does.
        for (first, next_one) in [
            (json!(CREATED), other()),
            (json!(CREATED), Value::Null),
            (Value::Null, json!(CREATED)),
            (Value::Null, Value::Null),
            (json!(CREATED), json!(7)),
            (json!("x".repeat(200)), json!("x".repeat(200))),
        ] {
            let mut lab = Lab::new();
            let (stack, seen) = stack(&lab);
            let running = run(&stack, call());
            let mut server = next(&mut lab, version).await;
            let asked = server.wanted("tools/call").await;
            server.answer(&asked, of_another(created(version, json!(1000)), &first)).await;
            // Over one connection the id is enough.
            let asked = server.polled().await;
            server.answer(&asked, of_another(status(version, "working", json!(1000)), &first)).await;
            drop(server);
            let mut server = next(&mut lab, version).await;
            let asked = server.polled().await;
            let mut done = of_another(status(version, "completed", json!(1000)), &next_one);
            done["result"] = result();
            server.answer(&asked, done).await;
            let (error, task) = unfinished(running, Reason::Replaced).await;
            assert_unknown(&error);
            assert!(!Unfinished::of(&error).unwrap().goes_on());
            assert_eq!(task.status(), Status::Working);
            assert_eq!(*seen.lock().unwrap(), [UNKNOWN]);
            server.is_left_alone().await;
        }
    }
}

#[test]
fn a_time_is_the_same_however_it_is_written() {
    for (one, other, same) in [
        (CREATED, CREATED, true),
        (CREATED, "2026-11-30T00:00:00+00:00", true),
        (CREATED, "2026-11-30T01:30:00.000+01:30", true),
        (CREATED, "2026-11-29T19:00:00-05:00", true),
        (CREATED, "2026-11-30T00:00:01Z", false),
        (CREATED, "2026-11-30T00:00:00+01:00", false),
        (CREATED, "2025-11-30T00:00:00Z", false),
        ("2026-11-30T00:00:00.123456Z", "2026-11-30t00:00:00.123z", true),
        ("2026-11-30T00:00:00.120Z", "2026-11-30 00:00:00.12+00:00", true),
        ("2026-11-30T00:00:00.120456Z", "2026-11-30T00:00:00.120Z", true),
        ("2026-11-30T00:00:00.000456Z", "2026-11-30T00:00:00.000Z", true),
        ("2026-11-30T00:00:00.123456Z", "2026-11-30T00:00:00.12Z", false),
        ("2026-11-30T00:00:00.123Z", "2026-11-30T00:00:00Z", false),
        ("2026-11-30T00:00:00.123Z", "2026-11-30T00:00:00.124Z", false),
        ("2024-02-29T23:30:00Z", "2024-03-01T00:00:00+00:30", true),
        ("2025-02-28T23:30:00Z", "2025-03-01T00:00:00+00:30", true),
        ("2023-12-31T23:59:59Z", "2024-01-01T00:59:59+01:00", true),
        // What is no such time is a text.
        ("yesterday", "yesterday", true),
        ("yesterday", "today", false),
        ("2026-11-30T00:00:00", CREATED, false),
        ("2026-11-30T00:00:00.1", CREATED, false),
        ("2026-11-30T00:00:00+aa:bb", CREATED, false),
        ("2026-11-30T00:00:0\u{e4}Z", CREATED, false),
        ("", CREATED, false),
    ] {
        for (one, other) in [(one, other), (other, one)] {
            assert_eq!(tasks::is_same_time(one, other), same, "{one} {other}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_task_that_another_has_replaced_on_the_same_connection_is_not_it() {
    for version in ERAS {
        let mut lab = Lab::new();
        let (stack, _) = stack(&lab);
        let running = run(&stack, call());
        let mut server = next(&mut lab, version).await;
        server.makes_a_task(version, json!(1000)).await;
        let asked = server.polled().await;
        let other = of_another(status(version, "completed", json!(1000)), &json!("2026-11-30T00:00:01Z"));
        server.answer(&asked, other).await;
        assert_unknown(&unfinished(running, Reason::Replaced).await.0);
    }
}

/// The status is of the task, and then another process has its id.
#[tokio::test(start_paused = true)]
async fn a_result_is_asked_for_only_where_the_task_was_seen() {
    for same in [true, false] {
        let mut lab = Lab::new();
        let (stack, _) = stack(&lab);
        let running = run(&stack, call());
        let mut server = next(&mut lab, V2025_11_25).await;
        server.makes_a_task(V2025_11_25, json!(1000)).await;
        let asked = server.polled().await;
        server.answer(&asked, status(V2025_11_25, "completed", json!(1000))).await;
        // Be it before it is asked there.
        drop(server);
        let mut server = next(&mut lab, V2025_11_25).await;
        if same {
            server.completes(V2025_11_25, result()).await;
            assert_eq!(ok(running).await, result());
        } else {
            let asked = server.polled().await;
            let other =
                of_another(status(V2025_11_25, "completed", json!(1)), &json!("2026-11-30T00:00:01Z"));
            server.answer(&asked, other).await;
            assert_unknown(&unfinished(running, Reason::Replaced).await.0);
            server.is_left_alone().await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_task_is_not_cancelled_by_its_id_alone_on_another_connection() {
    for version in ERAS {
        for (at, status_now) in
            [(CREATED, "working"), (CREATED, "completed"), ("2026-11-30T00:00:01Z", "working")]
        {
            let mut lab = Lab::new();
            let (stack, _) = stack(&lab);
            let starting = {
                let stack = stack.clone();
                tokio::spawn(async move { tasks::start(&*stack, call()).await })
            };
            let mut server = next(&mut lab, version).await;
            server.makes_a_task(version, json!(1000)).await;
            let Started::Task(task) = starting.await.unwrap().unwrap() else { panic!() };
            drop(server);
            let cancelling = {
                let stack = stack.clone();
                tokio::spawn(async move { tasks::cancel(&*stack, &task, Deadline::Inherit).await })
            };
            let mut server = next(&mut lab, version).await;
            let asked = server.polled().await;
            server.answer(&asked, of_another(status(version, status_now, json!(1000)), &json!(at))).await;
            match (at, status_now) {
                (CREATED, "working") => {
                    let asked = server.wanted("tasks/cancel").await;
                    server.answer(&asked, status(version, "cancelled", json!(1000))).await;
                    assert_eq!(cancelling.await.unwrap().unwrap().status(), Status::Cancelled);
                }
                (CREATED, _) => assert_eq!(cancelling.await.unwrap().unwrap().status(), Status::Completed),
                _ => {
                    let error = cancelling.await.unwrap().unwrap_err();
                    assert_eq!((error.outcome(), error.method()), (Outcome::NotDone, "tasks/cancel"));
                    assert_eq!(Unfinished::of(&error).unwrap().reason(), Reason::Replaced);
                }
            }
            server.is_left_alone().await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn of_a_task_that_somebody_kept_the_time_of_its_creation_counts_too() {
    for version in ERAS {
        for (kept, is_it) in [(None, true), (Some(CREATED), true), (Some("2026-11-29T00:00:00Z"), false)] {
            let mut lab = Lab::new();
            let (stack, _) = stack(&lab);
            let task = Task::new("t-1");
            let task = kept.map_or(task.clone(), |at| task.created(at));
            assert_eq!(task.created_at(), kept);
            let asking = {
                let (stack, task) = (stack.clone(), task.clone());
                tokio::spawn(async move { tasks::get(&*stack, &task, Deadline::Inherit).await })
            };
            let mut server = next(&mut lab, version).await;
            server.says(version, "working").await;
            let resumed = resume(&stack, &task);
            match is_it {
                true => {
                    server.completes(version, result()).await;
                    assert_eq!(ok(resumed).await, result());
                    assert_eq!(asking.await.unwrap().unwrap().created_at(), Some(CREATED));
                }
                false => {
                    server.says(version, "completed").await;
                    unfinished(resumed, Reason::Replaced).await;
                    let (other, kept) = (stack.clone(), task.clone());
                    let cancelling =
                        tokio::spawn(async move { tasks::cancel(&*other, &kept, Deadline::Inherit).await });
                    server.says(version, "working").await;
                    assert_eq!(cancelling.await.unwrap().unwrap_err().outcome(), Outcome::NotDone);
                    let waiting = {
                        let (stack, task) = (stack.clone(), task.clone());
                        tokio::spawn(async move { tasks::result(&*stack, &task, Deadline::Inherit).await })
                    };
                    server.says(version, "working").await;
                    unfinished(waiting, Reason::Replaced).await;
                    let error = asking.await.unwrap().unwrap_err();
                    assert_eq!(Unfinished::of(&error).unwrap().reason(), Reason::Replaced);
                    assert_eq!((error.outcome(), error.method()), (Outcome::Answered, "tasks/get"));
                }
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn lost_before_its_id_is_known_it_is_a_write_in_doubt_and_not_replayed() {
    for version in ERAS {
        let mut lab = Lab::new();
        let (stack, seen) = stack(&lab);
        let running = run(&stack, call());
        let mut server = next(&mut lab, version).await;
        server.asked("tools/call").await;
        drop(server);
        let error = running.await.unwrap().unwrap_err();
        assert_unknown(&error);
        assert!(Unfinished::of(&error).is_none());
        assert_eq!(*seen.lock().unwrap(), [UNKNOWN]);
        assert!(lab.servers.try_recv().is_err());
    }
}

#[tokio::test(start_paused = true)]
async fn a_task_that_the_next_process_does_not_know_is_unknown_and_reported_once() {
    for version in ERAS {
        for code in [-32602, -32601] {
            let mut lab = Lab::new();
            let (stack, seen) = stack(&lab);
            let running = run(&stack, call());
            let mut server = next(&mut lab, version).await;
            server.makes_a_task(version, json!(1000)).await;
            drop(server);
            let mut server = next(&mut lab, version).await;
            let asked = server.polled().await;
            server.refuse(&asked, code, Value::Null).await;
            let (error, _) = unfinished(running, Reason::Forgotten).await;
            assert_unknown(&error);
            assert!(!Unfinished::of(&error).unwrap().goes_on());
            assert_eq!(*seen.lock().unwrap(), [UNKNOWN]);
            server.is_left_alone().await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn what_becomes_of_a_read_only_tools_task_is_no_doubt() {
    let mut lab = Lab::new();
    let (stack, seen) = classified(&lab, Some(Effect::ReadOnly));
    let running = run(&stack, call());
    let mut server = next(&mut lab, V2026_07_28).await;
    server.makes_a_task(V2026_07_28, json!(1000)).await;
    let asked = server.polled().await;
    server.refuse(&asked, -32602, Value::Null).await;
    let (error, task) = unfinished(running, Reason::Forgotten).await;
    assert_eq!((error.outcome(), error.basis()), (Outcome::NoAnswer, Basis::Caller));
    assert_eq!(task.effect(), Effect::ReadOnly);
    assert!(error.is_safe_to_repeat() && seen.lock().unwrap().is_empty());
}

#[tokio::test(start_paused = true)]
async fn one_deadline_covers_it_all_and_afterwards_the_task_can_be_gone_on_with() {
    for version in ERAS {
        for own in [Some(Duration::from_secs(30)), None] {
            let mut lab = Lab::new();
            let (stack, seen) = stack(&lab);
            let began = Instant::now();
            let request = call();
            let running = run(&stack, own.map_or(request.clone(), |own| request.within(own)));
            let mut server = next(&mut lab, version).await;
            // Some time goes by before there is a task.
            let asked = server.asked("tools/call").await;
            sleep(Duration::from_secs(10)).await;
            server.answer(&asked, created(version, json!(12_000))).await;
            let serving = tokio::spawn(async move {
                let mut looks = Vec::new();
                while let Ok(asked) = timeout(MINUTE, server.polled()).await {
                    looks.push(began.elapsed().as_secs());
                    server.answer(&asked, status(version, "working", json!(12_000))).await;
                }
                (server, looks)
            });
            let (error, task) = unfinished(running, Reason::Deadline).await;
            let (end, looks_due) = match own {
                Some(_) => (30, &[22, 29][..]),
                None => (60, &[22, 34, 46, 58, 59][..]),
            };
            assert!((end - 1..=end).contains(&began.elapsed().as_secs()), "{:?}", began.elapsed());
            assert!(matches!(error.cause(), Cause::Deadline));
            assert_unknown(&error);
            assert!(error.to_string().contains("; the task goes on at the server; "), "{error}");
            assert!(Unfinished::of(&error).unwrap().goes_on());
            assert_eq!((task.status(), task.effect()), (Status::Working, Effect::Write));
            assert_eq!(*seen.lock().unwrap(), [UNKNOWN]);
            let (mut server, looks) = serving.await.unwrap();
            assert_eq!(looks, looks_due);

            // At once, by the task or by the id that somebody kept.
            for task in [task, Task::new("t-1")] {
                let resumed = resume(&stack, &task);
                server.completes(version, result()).await;
                assert_eq!(ok(resumed).await, result());
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_status_that_is_not_answered_ends_at_the_deadline() {
    let mut lab = Lab::new();
    let (stack, _) = stack(&lab);
    let running = run(&stack, call().within(Duration::from_secs(4)));
    let mut server = next(&mut lab, V2025_11_25).await;
    server.makes_a_task(V2025_11_25, json!(1000)).await;
    server.polled().await;
    let began = Instant::now();
    let (error, _) = unfinished(running, Reason::Deadline).await;
    assert_unknown(&error);
    assert_eq!(began.elapsed().as_secs(), 3);
}

#[tokio::test(start_paused = true)]
async fn what_the_tool_says_is_an_answer() {
    let failed = json!({ "content": [], "isError": true });
    for version in ERAS {
        let mut lab = Lab::new();
        let (stack, seen) = stack(&lab);
        let running = run(&stack, call());
        let mut server = next(&mut lab, version).await;
        server.makes_a_task(version, json!(1000)).await;
        server.completes(version, failed.clone()).await;
        assert_eq!(ok(running).await, failed);

        let running = run(&stack, call());
        server.makes_a_task(version, json!(1000)).await;
        let own = json!({ "code": -32602, "message": "no such scene", "data": 7 });
        let asked = server.polled().await;
        let mut status = status(version, "failed", json!(1000));
        if version.has_handshake() {
            server.answer(&asked, status.clone()).await;
            let asked = server.wanted("tasks/result").await;
            server.write(json!({ "jsonrpc": "2.0", "id": asked["id"], "error": own })).await;
            // Whether that is the tool's word shows in the status.
            let asked = server.polled().await;
            server.answer(&asked, status).await;
        } else {
            status["error"] = own;
            server.answer(&asked, status).await;
        }
        let error = running.await.unwrap().unwrap_err();
        assert_eq!(error.outcome(), Outcome::Answered, "{error}");
        assert_eq!(error.to_string(), "answered: tools/call: no such scene (code -32602)");
        assert_eq!(error.answer().unwrap().data, Some(json!(7)));
        assert!(!error.may_have_landed() && seen.lock().unwrap().is_empty());
    }
}

#[tokio::test(start_paused = true)]
async fn a_result_that_cannot_be_had_is_unknown() {
    // The task's time is over between the two; it is there without a result; the method is not there.
    for (refusal, then, reason) in [
        (-32602, None, Reason::Forgotten),
        (-32603, Some("completed"), Reason::ResultLost),
        (-32603, Some("cancelled"), Reason::Cancelled),
        (-32601, None, Reason::ResultLost),
    ] {
        let mut lab = Lab::new();
        let (stack, seen) = stack(&lab);
        let running = run(&stack, call());
        let mut server = next(&mut lab, V2025_11_25).await;
        server.makes_a_task(V2025_11_25, json!(1000)).await;
        server.says(V2025_11_25, "completed").await;
        let asked = server.wanted("tasks/result").await;
        server.refuse(&asked, refusal, Value::Null).await;
        match then {
            Some(then) => server.says(V2025_11_25, then).await,
            None if refusal == -32602 => {
                let asked = server.polled().await;
                server.refuse(&asked, -32602, Value::Null).await;
            }
            None => {}
        }
        let (error, _) = unfinished(running, reason).await;
        assert_unknown(&error);
        assert_eq!(*seen.lock().unwrap(), [UNKNOWN]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_status_that_cannot_be_read_is_asked_for_again_and_not_for_ever() {
    for version in ERAS {
        for recovers in [true, false] {
            let mut lab = Lab::new();
            let (stack, seen) = stack(&lab);
            let running = run(&stack, call().within(MINUTE * 10));
            let mut server = next(&mut lab, version).await;
            server.makes_a_task(version, json!(1000)).await;
            for round in 0..5 {
                let asked = server.polled().await;
                match round % 2 {
                    0 => server.refuse(&asked, -32603, Value::Null).await,
                    _ => server.answer(&asked, json!({ "status": 7 })).await,
                }
                if recovers && round == 3 {
                    break;
                }
            }
            if recovers {
                server.says(version, "working").await;
                server.completes(version, result()).await;
                assert_eq!(ok(running).await, result());
            } else {
                let (error, task) = unfinished(running, Reason::Unread).await;
                assert_unknown(&error);
                assert_eq!(*seen.lock().unwrap(), [UNKNOWN]);
                let source = std::error::Error::source(Unfinished::of(&error).unwrap()).unwrap();
                assert!(source.to_string().starts_with("answered: tasks/get: "), "{source}");
                let resumed = resume(&stack, &task);
                server.completes(version, result()).await;
                assert_eq!(ok(resumed).await, result());
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_task_that_waits_for_the_user_is_the_callers_business() {
    for version in ERAS {
        let mut lab = Lab::new();
        let (stack, seen) = stack(&lab);
        let running = run(&stack, call());
        let mut server = next(&mut lab, version).await;
        server.makes_a_task(version, json!(1000)).await;
        let asked = server.polled().await;
        let mut waits = status(version, "input_required", json!(1000));
        waits["inputRequests"] = json!({ "a": { "method": "elicitation/create" } });
        server.answer(&asked, waits.clone()).await;
        let (error, task) = unfinished(running, Reason::InputRequired).await;
        assert_eq!(task.status(), Status::InputRequired);
        let unfinished = Unfinished::of(&error).unwrap();
        assert_eq!(unfinished.answer().unwrap().parse::<Value>().unwrap(), waits);
        assert!(unfinished.goes_on() && seen.lock().unwrap().is_empty());
        assert_eq!(error.outcome(), Outcome::Unknown);

        if version.has_handshake() {
            // Waits in `tasks/result`.
            let waiting = {
                let stack = stack.clone();
                tokio::spawn(async move { tasks::result(&*stack, &task, Deadline::Inherit).await })
            };
            let asked = server.wanted("tasks/result").await;
            sleep(Duration::from_secs(30)).await;
            server.answer(&asked, result()).await;
            assert_eq!(ok(waiting).await, result());
        } else {
            let resumed = resume(&stack, &task);
            server.completes(version, result()).await;
            assert_eq!(ok(resumed).await, result());
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_task_is_cancelled_and_that_is_no_proof_that_nothing_was_done() {
    for version in ERAS {
        let mut lab = Lab::new();
        let (stack, seen) = stack(&lab);
        let starting = {
            let stack = stack.clone();
            tokio::spawn(async move { tasks::start(&*stack, call()).await })
        };
        let mut server = next(&mut lab, version).await;
        server.makes_a_task(version, json!(1000)).await;
        let Started::Task(task) = starting.await.unwrap().unwrap() else { panic!() };
        let running = resume(&stack, &task);
        server.says(version, "working").await;
        let cancelling = {
            let (stack, task) = (stack.clone(), task.clone());
            tokio::spawn(async move { tasks::cancel(&*stack, &task, Deadline::Inherit).await })
        };
        let asked = server.wanted("tasks/cancel").await;
        assert_eq!(asked["params"]["taskId"], "t-1");
        if version.has_handshake() {
            server.answer(&asked, status(version, "cancelled", json!(1000))).await;
        } else {
            server.answer(&asked, json!({ "resultType": "complete" })).await;
            server.says(version, "cancelled").await;
        }
        assert_eq!(cancelling.await.unwrap().unwrap().status(), Status::Cancelled);
        server.says(version, "cancelled").await;
        let (error, _) = unfinished(running, Reason::Cancelled).await;
        assert_unknown(&error);
        assert_eq!(*seen.lock().unwrap(), [UNKNOWN]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_cancellation_that_is_refused_or_lost_is_settled_by_reading_the_task() {
    for version in ERAS {
        for (lost, ended) in [(true, true), (false, true), (true, false), (false, false)] {
            let mut lab = Lab::new();
            let (stack, _) = stack(&lab);
            let cancelling = {
                let stack = stack.clone();
                let task = Task::new("t-1");
                tokio::spawn(async move { tasks::cancel(&*stack, &task, Deadline::Inherit).await })
            };
            let mut server = next(&mut lab, version).await;
            let asked = server.wanted("tasks/cancel").await;
            if lost {
                drop(server);
                server = next(&mut lab, version).await;
            } else {
                server.refuse(&asked, -32602, Value::Null).await;
            }
            server.says(version, if ended { "completed" } else { "working" }).await;
            match (cancelling.await.unwrap(), ended, lost) {
                (Ok(task), true, _) => assert_eq!(task.status(), Status::Completed),
                (Err(error), false, true) => {
                    assert_eq!((error.outcome(), error.effect()), (Outcome::Unknown, Effect::Idempotent));
                }
                (Err(error), false, false) => assert_eq!(error.outcome(), Outcome::Answered),
                other => panic!("{other:?}"),
            }
        }
    }
}

/// What servers say of a task often names it, and whoever knows a task's id may read its result.
#[tokio::test(start_paused = true)]
async fn the_id_of_a_task_is_in_no_text_of_an_error_whatever_the_server_says() {
    let texts = |error: &CallError| {
        let mut texts = format!("{error} {error:?}");
        let mut source = std::error::Error::source(error);
        while let Some(inner) = source {
            texts += &format!(" {inner} {inner:?}");
            source = inner.source();
        }
        texts
    };
    for id in ["hunter2", "hun\"ter2"] {
        let error = |code: i64, asked: &Value| {
            let message = format!("Task not found: {id} ({})", json!({ "id": id }));
            let error = json!({ "code": code, "message": message, "data": { "id": id } });
            json!({ "jsonrpc": "2.0", "id": asked["id"], "error": error })
        };
        let named = |answer: Value| {
            serde_json::from_str::<Value>(&answer.to_string().replace("t-1", &id.replace('"', "\\\"")))
                .unwrap()
        };
        // The task is gone, or cannot be read for long, or has failed.
        for (method, code, times) in
            [("tasks/get", -32602, 1), ("tasks/get", -32603, 5), ("tasks/result", -32000, 1)]
        {
            let mut lab = Lab::new();
            let (stack, _) = stack(&lab);
            let running = run(&stack, call().within(MINUTE * 10));
            let mut server = next(&mut lab, V2025_11_25).await;
            let asked = server.wanted("tools/call").await;
            server.answer(&asked, named(created(V2025_11_25, json!(100)))).await;
            let failed = named(status(V2025_11_25, "failed", json!(100)));
            if method == "tasks/result" {
                let asked = server.wanted("tasks/get").await;
                server.answer(&asked, failed.clone()).await;
            }
            for _ in 0..times {
                let asked = server.wanted(method).await;
                assert_eq!(asked["params"]["taskId"], id);
                server.write(error(code, &asked)).await;
            }
            if method == "tasks/result" {
                let asked = server.wanted("tasks/get").await;
                server.answer(&asked, failed).await;
            }
            let error = running.await.unwrap().unwrap_err();
            let texts = texts(&error);
            assert!(!texts.contains("hun"), "{texts}");
            // All else is told.
            assert!(texts.contains("Task not found: .. "), "{texts}");
        }
        // The task of 2026-07-28 that has failed says so in its status.
        let mut lab = Lab::new();
        let (stack, _) = stack(&lab);
        let running = run(&stack, call());
        let mut server = next(&mut lab, V2026_07_28).await;
        let asked = server.wanted("tools/call").await;
        server.answer(&asked, named(created(V2026_07_28, json!(100)))).await;
        let asked = server.wanted("tasks/get").await;
        let mut failed = named(status(V2026_07_28, "failed", json!(100)));
        failed["error"] = error(-32000, &asked)["error"].clone();
        server.answer(&asked, failed).await;
        let failed = running.await.unwrap().unwrap_err();
        assert!(!texts(&failed).contains("hun"), "{failed}");

        // Whoever asks for it by itself.
        let task = Task::new(id);
        let asking = {
            let (stack, task) = (stack.clone(), task.clone());
            tokio::spawn(async move { tasks::get(&*stack, &task, Deadline::Inherit).await })
        };
        let asked = server.wanted("tasks/get").await;
        server.write(error(-32602, &asked)).await;
        let refused = asking.await.unwrap().unwrap_err();
        assert!(!texts(&refused).contains("hun"), "{refused}");
        assert_eq!(refused.answer().unwrap().data, Some(json!({ "id": id })));
        let asking = tokio::spawn(async move { tasks::cancel(&*stack, &task, Deadline::Inherit).await });
        let asked = server.wanted("tasks/cancel").await;
        server.write(error(-32603, &asked)).await;
        let refused = asking.await.unwrap().unwrap_err();
        assert!(!texts(&refused).contains("hun"), "{refused}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_write_whose_wait_is_dropped_is_reported_as_abandoned() {
    let mut lab = Lab::new();
    let (stack, seen) = stack(&lab);
    let running = run(&stack, call());
    let mut server = next(&mut lab, V2026_07_28).await;
    server.makes_a_task(V2026_07_28, json!(1000)).await;
    server.polled().await;
    running.abort();
    assert!(running.await.unwrap_err().is_cancelled());
    assert_eq!(*seen.lock().unwrap(), [("abandoned", Effect::Write, Some(Outcome::Unknown))]);
}

#[test]
fn the_wish_for_a_task_leaves_the_rest_of_the_call_as_it_is() {
    let mut request = request("tools/call", json!({ "name": "x", "arguments": { "n": 1 }, "_meta": {} }));
    request.context_mut().stamp(Effect::Idempotent, Basis::Caller);
    let asked = tasks::asked(request, Duration::from_millis(1500)).unwrap();
    assert_eq!(
        asked.params::<Value>().unwrap(),
        json!({ "name": "x", "arguments": { "n": 1 }, "_meta": {}, "task": { "ttl": 1500 } })
    );
    assert_eq!(Call::effect(&asked), Effect::Idempotent);
    let bare = tasks::asked(Request::new("tools/call", ()).unwrap(), Duration::ZERO).unwrap();
    assert_eq!(bare.params::<Value>().unwrap(), json!({ "task": { "ttl": 0 } }));
    assert!(tasks::asked(Request::new("tools/call", [1]).unwrap(), Duration::ZERO).is_err());
}

#[tokio::test(start_paused = true)]
async fn a_task_is_taken_for_what_its_call_was_when_it_was_sent() {
    let mut lab = Lab::new();
    let effect = Arc::new(Mutex::new(Effect::ReadOnly));
    let (tell, settings, memory) = (lab.tell.clone(), Arc::new(lab.settings.clone()), lab.memory.clone());
    let connector = service_fn(move |()| connect(Wire(tell.clone()), settings.clone(), memory.clone()));
    let now = effect.clone();
    let stack = Stack::builder(BoxCloneService::new(connector))
        .deadline(MINUTE)
        .classify(move |request: &Request| (request.method() == "tools/call").then(|| *now.lock().unwrap()))
        .build()
        .unwrap();
    let stack: Arc<Bare> = Arc::new(stack);
    // The server's word about the tool changes before the call is sent.
    let mut starting = Box::pin({
        let stack = stack.clone();
        async move {
            let start = tasks::start(&*stack, call());
            *effect.lock().unwrap() = Effect::Write;
            start.await
        }
    });
    let answering = async {
        let mut server = next(&mut lab, V2025_11_25).await;
        server.makes_a_task(V2025_11_25, json!(2000)).await;
        server
    };
    let (started, _server) = tokio::join!(&mut starting, answering);
    let Ok(Started::Task(task)) = started else { panic!("{started:?}") };
    assert_eq!(task.effect(), Effect::Write);
}
