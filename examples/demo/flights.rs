//! The twelve flights. Each lets the server fail in one way and says what must come out.
//!
//! No flight depends on how fast the machine is: the server fails at a certain call, not at a certain time. The
//! two flights that are about time say so.

use std::time::Duration;

use goaround::{BoxError, Call, FenceBasis, Outcome, VerdictKind, WriteSafetyLayer, jsonrpc::Request};
use serde_json::json;
use tokio::time::sleep;

use crate::{
    flight::{Expected, Flight, Flown, Landed, PATIENCE, create_invoice, look_for_invoice},
    report::Board,
    server::Fault,
};

/// Flies all of them, one after the other. `true` if all came out as they must.
pub(crate) async fn fly_all(json: bool) -> Result<bool, BoxError> {
    let mut board = Board::new(12);
    board.fly("plain read", plain_read()).await;
    board.fly("read, server killed mid-call", killed_mid_call()).await;
    board.fly("eight reads at one closure", eight_reads()).await;
    board.fly("idle server gone before the call", idle_server_gone()).await;
    board.fly("write, reply lost", reply_lost()).await;
    board.fly("write, killed before commit", killed_before_commit()).await;
    board.fly("write, no check given", no_check()).await;
    board.fly("server that goes on working", goes_on_working()).await;
    board.fly("slow write", slow_write()).await;
    board.fly("hang", hang()).await;
    board.fly("the server's own error", own_error()).await;
    board.fly("read that kills the server every time", killed_every_time()).await;
    board.close(json)
}

const ANSWERED: Expected = Expected { outcome: None, attempts: 1, effects: 0 };
const REPLAYED: Expected = Expected { outcome: None, attempts: 2, effects: 0 };
const DONE: Expected = Expected { outcome: None, attempts: 1, effects: 1 };

async fn plain_read() -> Result<Landed, BoxError> {
    let flight = Flight::new()?;
    let read = flight.read(Fault::None).await?;
    let mut landed = flight.land().await?;
    landed.call(&read, "answers", ANSWERED);
    landed.reconnects(0);
    Ok(landed)
}

async fn killed_mid_call() -> Result<Landed, BoxError> {
    let flight = Flight::new()?;
    let read = flight.read(Fault::Die).await?;
    let mut landed = flight.land().await?;
    landed.call(&read, "SIGKILL; started again, asked again", REPLAYED);
    landed.reconnects(1);
    landed.recoveries(1);
    Ok(landed)
}

async fn eight_reads() -> Result<Landed, BoxError> {
    let flight = Flight::new()?;
    let read = || flight.read(Fault::DieAtEight);
    let (a, b, c, d, e, f, g, h) =
        tokio::try_join!(read(), read(), read(), read(), read(), read(), read(), read())?;
    let mut landed = flight.land().await?;
    for read in [a, b, c, d, e, f, g, h] {
        landed.call(&read, "SIGKILL with eight in flight", REPLAYED);
    }
    landed.reconnects(1);
    landed.recoveries(1);
    Ok(landed)
}

async fn idle_server_gone() -> Result<Landed, BoxError> {
    let flight = Flight::new()?;
    flight.read(Fault::Leave).await?;
    flight.server_gone().await?;
    let read = flight.read(Fault::Leave).await?;
    flight.server_gone().await?;
    // No check is needed, and none is given: provably not one byte of it was sent to the server that is gone.
    let write = flight.write(Fault::None).await?;
    let mut landed = flight.land().await?;
    landed.call(&read, "had exited; not sent, started again", ANSWERED);
    landed.call(&write, "had exited; not sent, started again", DONE);
    landed.reconnects(2);
    Ok(landed)
}

async fn reply_lost() -> Result<Landed, BoxError> {
    let flight = Flight::with_check()?;
    let write = flight.write(Fault::CommitThenDie).await?;
    let mut landed = flight.land().await?;
    landed.call(&write, "commits, SIGKILL; the check finds it", DONE);
    landed.reconnects(1);
    settled(&mut landed, &write, VerdictKind::Landed, false);
    Ok(landed)
}

async fn killed_before_commit() -> Result<Landed, BoxError> {
    let flight = Flight::with_check()?;
    let write = flight.write(Fault::Die).await?;
    let mut landed = flight.land().await?;
    let expected = Expected { outcome: None, attempts: 2, effects: 1 };
    landed.call(&write, "SIGKILL; gone, not there: one replay", expected);
    landed.reconnects(1);
    settled(&mut landed, &write, VerdictKind::NotLanded, true);
    let fence = write.doubt.as_ref().and_then(|doubt| doubt.fence.as_ref());
    landed.expect(
        fence.is_some_and(|fence| fence.basis() == FenceBasis::Observed),
        "that the end of the process group was observed before the replay",
    );
    Ok(landed)
}

async fn no_check() -> Result<Landed, BoxError> {
    let flight = Flight::new()?;
    let commits = flight.write(Fault::CommitThenDie).await?;
    let dies = flight.write(Fault::Die).await?;
    let mut landed = flight.land().await?;
    let unknown = |effects| Expected { outcome: Some(Outcome::Unknown), attempts: 1, effects };
    landed.call(&commits, "commits, SIGKILL", unknown(1));
    landed.call(&dies, "SIGKILL", unknown(0));
    for write in [&commits, &dies] {
        let error = write.error();
        landed.expect(
            error.is_some_and(|error| error.may_have_landed() && error.closure().is_some()),
            "an error that says that the write may have landed, and how the connection ended",
        );
        landed.expect(
            write.doubt.as_ref().is_some_and(|doubt| !doubt.replayed),
            "a report of the write in doubt, and no replay",
        );
    }
    landed.reconnects(1);
    Ok(landed)
}

async fn goes_on_working() -> Result<Landed, BoxError> {
    // Patience, so that it comes to its commit: a server that is cut short commits nothing, and its write is
    // then replayed.
    let flight = Flight::prepare(Duration::from_secs(10), |stack| stack.check(look_for_invoice))?;
    let write = flight.write(Fault::GoOn).await?;
    let mut landed = flight.land().await?;
    landed.call(&write, "closes its output, commits 300 ms later", DONE);
    landed.reconnects(1);
    settled(&mut landed, &write, VerdictKind::Landed, false);
    // The old process had ended before the new one began, and so before anybody looked for the invoice.
    let order = landed.journal.order().join(" ");
    let one_by_one = order.starts_with("start commit end start");
    landed.expect(one_by_one, format!("one server after the other, and not {order}"));
    Ok(landed)
}

/// About time: the attempt must time out while the server is at work.
async fn slow_write() -> Result<Landed, BoxError> {
    let flight = Flight::prepare(PATIENCE, |stack| {
        stack.writes(WriteSafetyLayer::new(look_for_invoice).attempt_timeout(Duration::from_millis(300)))
    })?;
    // So that the time is not spent on starting the server.
    flight.read(Fault::None).await?;
    // The server holds the answer back until it sees the check's question.
    let write = flight.write(Fault::HoldBack).await?;
    let mut landed = flight.land().await?;
    landed.call(&write, "answers late, while the check asks", DONE);
    landed.reconnects(0);
    let doubt = write.doubt.as_ref();
    landed.expect(
        doubt.is_some_and(|doubt| doubt.verdict.is_none() && !doubt.replayed && doubt.outcome.is_none()),
        "that the late answer ends the doubt, with no verdict and no replay",
    );
    Ok(landed)
}

/// About time: the deadlines of the four calls must pass, and not before their bytes are on their way.
async fn hang() -> Result<Landed, BoxError> {
    const DEADLINE: Duration = Duration::from_secs(1);
    let flight = Flight::new()?;
    flight.read(Fault::None).await?;

    let read = Request::tool("get_invoice", json!({ "fault": Fault::Hang })).within(DEADLINE);
    let (invoice, write) = create_invoice(Fault::None)?;
    let write = write.within(DEADLINE);
    // More than a pipe holds: what comes after it stays in the queue.
    let large = Request::tool("get_invoice", json!({ "padding": "x".repeat(1 << 20) })).within(DEADLINE);
    let (queued_invoice, queued) = create_invoice(Fault::None)?;
    let queued = queued.within(DEADLINE);
    let (read, write, large, queued) = tokio::try_join!(
        flight.send(read, None),
        flight.send(write, Some(invoice)),
        flight.send(large, None),
        async {
            sleep(DEADLINE / 4).await;
            flight.send(queued, Some(queued_invoice)).await
        },
    )?;

    let mut landed = flight.land().await?;
    let expected = |outcome, attempts| Expected { outcome: Some(outcome), attempts, effects: 0 };
    landed.call(&read, "stops reading, never answers", expected(Outcome::NoAnswer, 1));
    landed.call(&write, "has it in its pipe, never answers", expected(Outcome::Unknown, 1));
    landed.call(&large, "has half of it in its pipe", expected(Outcome::NoAnswer, 1));
    landed.call(&queued, "never sees it: it waits behind the last", expected(Outcome::NotDone, 0));
    landed.reconnects(0);
    Ok(landed)
}

async fn own_error() -> Result<Landed, BoxError> {
    let flight = Flight::with_check()?;
    let read = flight.read(Fault::Quota).await?;
    let write = flight.write(Fault::Quota).await?;
    let mut landed = flight.land().await?;
    for call in [&read, &write] {
        let expected = Expected { outcome: Some(Outcome::Answered), attempts: 1, effects: 0 };
        landed.call(call, "answers with its error -32000 \"quota\"", expected);
        let answer = call.error().and_then(|error| error.answer());
        let data = json!({ "limit": 100, "resets": "tomorrow" });
        landed.expect(
            answer.is_some_and(|answer| {
                answer.code == -32000 && answer.message == "quota" && answer.data.as_ref() == Some(&data)
            }),
            "code, message and data of the server's error unchanged",
        );
    }
    landed.reconnects(0);
    Ok(landed)
}

async fn killed_every_time() -> Result<Landed, BoxError> {
    let flight = Flight::new()?;
    let read = flight.read(Fault::DieAlways).await?;
    // It did not take the server away from the others.
    let next = flight.read(Fault::None).await?;
    let mut landed = flight.land().await?;
    let expected = Expected { outcome: Some(Outcome::NoAnswer), attempts: 2, effects: 0 };
    landed.call(&read, "SIGKILL each time", expected);
    landed.call(&next, "started again; answers the next call", ANSWERED);
    landed.expect(
        read.error().is_some_and(|error| error.to_string().contains("given up after the second closure")),
        "that the error says why it was given up",
    );
    landed.reconnects(2);
    Ok(landed)
}

/// Expects that a check settled the doubt about a write.
fn settled(landed: &mut Landed, write: &Flown, verdict: VerdictKind, replayed: bool) {
    let told = write.doubt.as_ref().map(|doubt| (doubt.verdict, doubt.replayed));
    landed.expect(
        told == Some((Some(verdict), replayed)),
        format!("the verdict {verdict:?} and a replay: {replayed}; not {told:?}"),
    );
}
