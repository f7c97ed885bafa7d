//! The raw HTTP server that other tests script (`lab/http.rs`) does what it is told, byte for byte.

#[path = "lab/http.rs"]
mod http;

use std::{io, time::Duration};

use http::{BlackHole, Era, Gate, JSON, On, Reply, Server, nobody};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::{Instant, timeout},
};

const SOON: Duration = Duration::from_secs(10);

async fn connect(server: &Server) -> TcpStream {
    TcpStream::connect(server.address()).await.unwrap()
}

fn post(session: Option<&str>, body: &Value) -> String {
    let session = session.map(|session| format!("Mcp-Session-Id: {session}\r\n")).unwrap_or_default();
    let body = body.to_string();
    format!("POST /mcp HTTP/1.1\r\nHost: x\r\n{session}Content-Length: {}\r\n\r\n{body}", body.len())
}

fn call(id: u64, tool: &str, line: &str) -> Value {
    let params = json!({ "name": tool, "arguments": { "line": line }, "_meta": { "progressToken": 7 } });
    json!({ "jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params })
}

/// All that comes until the server closes the connection.
async fn exchange(server: &Server, request: &str) -> io::Result<String> {
    let mut stream = connect(server).await;
    stream.write_all(request.as_bytes()).await?;
    let mut answer = String::new();
    let read = timeout(SOON, stream.read_to_string(&mut answer)).await.expect("it ends");
    read.map(|_| answer)
}

/// One answer with a length; the connection stays.
async fn answer(stream: &mut TcpStream, request: &str) -> (String, String) {
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut text = String::new();
    let mut byte = [0];
    while !text.ends_with("\r\n\r\n") {
        timeout(SOON, stream.read_exact(&mut byte)).await.expect("it answers").unwrap();
        text.push(byte[0] as char);
    }
    let length = text.lines().find_map(|line| line.strip_prefix("Content-Length: "));
    let mut body = vec![0; length.map_or(0, |length| length.parse().unwrap())];
    stream.read_exact(&mut body).await.unwrap();
    (text, String::from_utf8(body).unwrap())
}

async fn session(stream: &mut TcpStream) -> String {
    let initialize = json!({
        "jsonrpc": "2.0", "id": 0, "method": "initialize", "params": { "protocolVersion": "2025-11-25" },
    });
    let (head, body) = answer(stream, &post(None, &initialize)).await;
    let body: Value = serde_json::from_str(&body).unwrap();
    assert_eq!(body["result"]["protocolVersion"], "2025-11-25");
    head.lines().find_map(|line| line.strip_prefix("Mcp-Session-Id: ")).unwrap().to_owned()
}

#[tokio::test]
async fn unscripted_it_is_an_honest_server_that_keeps_what_it_saw() {
    let server = Server::start().await;
    let mut stream = connect(&server).await;
    let session = session(&mut stream).await;
    assert_eq!(session, "s1");
    let (head, _) =
        answer(&mut stream, &post(Some("s1"), &json!({ "method": "notifications/initialized" }))).await;
    assert!(head.starts_with("HTTP/1.1 202 Accepted\r\n"), "{head}");
    let (_, body) = answer(&mut stream, &post(Some("s1"), &call(1, "append", "one"))).await;
    assert_eq!(body, r#"{"jsonrpc":"2.0","id":1,"result":{"content":[{"text":"appended","type":"text"}]}}"#);
    let (_, body) = answer(&mut stream, &post(Some("s1"), &call(2, "lines", ""))).await;
    let body: Value = serde_json::from_str(&body).unwrap();
    assert_eq!(body["result"]["structuredContent"]["result"], json!(["one"]));
    let (head, _) = answer(&mut stream, "GET /mcp HTTP/1.1\r\nMcp-Session-Id: s1\r\n\r\n").await;
    assert!(head.starts_with("HTTP/1.1 405 "), "{head}");
    let (head, _) = answer(&mut stream, "DELETE /mcp HTTP/1.1\r\nMcp-Session-Id: s1\r\n\r\n").await;
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
    let (head, body) = answer(&mut stream, &post(Some("s1"), &call(3, "append", "two"))).await;
    assert!(head.starts_with("HTTP/1.1 404 "), "the session has ended: {head}");
    assert!(body.contains("Session not found"));

    assert_eq!(server.effects(), ["one"]);
    let seen: Vec<_> = server.seen().iter().map(http::Seen::brief).collect();
    assert_eq!(
        seen,
        [
            "initialize",
            "notifications/initialized s1",
            "append s1",
            "lines s1",
            "GET s1",
            "DELETE s1",
            "append s1"
        ]
    );
    let one = &server.calls("append")[0];
    assert_eq!((one.id(), one.arguments(), one.connection), (&json!(1), &json!({ "line": "one" }), 1));
    assert_eq!((server.sessions(), server.connections()), (1, 1));
}

#[tokio::test]
async fn its_eras_differ_in_handshake_and_session() {
    for (era, method, session) in [
        (Era::Sessions, "initialize", true),
        (Era::NoSessions, "initialize", false),
        (Era::Modern, "server/discover", false),
    ] {
        let server = Server::of(era).await;
        let mut stream = connect(&server).await;
        let begin = json!({ "jsonrpc": "2.0", "id": 0, "method": method, "params": {} });
        let (head, body) = answer(&mut stream, &post(None, &begin)).await;
        assert!(body.contains("\"result\""), "{era:?}: {body}");
        assert_eq!(head.contains("Mcp-Session-Id"), session, "{era:?}");
        let (head, _) = answer(&mut stream, &post(None, &call(1, "append", "x"))).await;
        assert_eq!(head.starts_with("HTTP/1.1 200 OK\r\n"), !session, "{era:?}: {head}");
    }
}

#[tokio::test]
async fn scripted_bytes_are_sent_as_they_are_with_the_requests_own_ids_in_them() {
    let server = Server::start().await;
    let reply = Reply::sse()
        .chunk(": a comment\r\n")
        .chunk("data: $ID $STRING $TOKEN\n")
        .chunk("\n")
        .crumbs("$CALL")
        .end_of_chunks()
        .close();
    server.on(On::Tool("append"), reply);
    let text = exchange(&server, &post(None, &call(41, "append", "x"))).await.unwrap();
    let expected = concat!(
        "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n",
        "d\r\n: a comment\r\n\r\n",
        "10\r\ndata: 41 \"41\" 7\n\r\n",
        "1\r\n\n\r\n",
        "1\r\n4\r\n1\r\n1\r\n",
        "0\r\n\r\n"
    );
    assert_eq!(text, expected);

    server.on(
        On::Any,
        Reply::new().bytes(b"HTTP/1.1 200 OK\r\nContent-Length: 200\r\n\r\n{".as_slice()).close(),
    );
    let text = exchange(&server, &post(None, &call(1, "append", "x"))).await.unwrap();
    assert_eq!(text, "HTTP/1.1 200 OK\r\nContent-Length: 200\r\n\r\n{", "cut in the body");

    server.on(On::Any, Reply::http("429 Too Many Requests", &[("Retry-After", "7"), JSON], "{}").close());
    let text = exchange(&server, &post(None, &call(1, "append", "x"))).await.unwrap();
    let expected = concat!(
        "HTTP/1.1 429 Too Many Requests\r\nRetry-After: 7\r\n",
        "Content-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
    );
    assert_eq!(text, expected);

    server.on(On::Any, Reply::http("204 No Content", &[], "").close());
    let text = exchange(&server, &post(None, &call(1, "append", "x"))).await.unwrap();
    assert_eq!(text, "HTTP/1.1 204 No Content\r\n\r\n");
    assert!(server.effects().is_empty(), "no script said that the effect comes");
}

#[tokio::test]
async fn a_reset_is_a_reset_and_the_effect_comes_where_the_script_says() {
    let server = Server::start().await;
    server.on(On::Tool("append"), Reply::new().executes().reset());
    let error = exchange(&server, &post(None, &call(1, "append", "before"))).await.unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
    assert_eq!(server.effects(), ["before"]);

    // Works on for a client that is gone.
    let gate = Gate::new();
    server.on(On::Tool("append"), Reply::result(&json!({})).gate(&gate).executes());
    let mut stream = connect(&server).await;
    stream.write_all(post(None, &call(2, "append", "after")).as_bytes()).await.unwrap();
    server.until_called("append", 2).await;
    drop(stream);
    gate.open(1);
    server.until(|_| server.effects().len() == 2).await;
    assert_eq!(server.effects(), ["before", "after"]);
}

#[tokio::test]
async fn scripts_are_used_in_their_order_and_only_by_the_requests_that_they_are_for() {
    let server = Server::of(Era::NoSessions).await;
    server
        .on(On::Tool("append"), Reply::error(-1, "first"))
        .on(On::Tool("append"), Reply::error(-2, "second"))
        .always(On::Method("ping"), Reply::error(-3, "no ping"));
    let mut stream = connect(&server).await;
    let mut codes = Vec::new();
    for _ in 0..3 {
        let ping = json!({ "jsonrpc": "2.0", "id": 9, "method": "ping" });
        for request in [call(1, "append", "x"), ping] {
            let (_, body) = answer(&mut stream, &post(None, &request)).await;
            let body: Value = serde_json::from_str(&body).unwrap();
            codes.push(body["error"]["code"].as_i64().unwrap_or_default());
        }
    }
    assert_eq!(codes, [-1, -3, -2, -3, 0, -3]);
    server.heal();
    let ping = json!({ "jsonrpc": "2.0", "id": 9, "method": "ping" });
    assert!(answer(&mut stream, &post(None, &ping)).await.1.contains("\"result\""));
}

#[tokio::test]
async fn it_notices_that_a_client_has_gone_while_it_stalled() {
    let server = Server::of(Era::NoSessions).await;
    server
        .on(On::Tool("append"), Reply::sse().stall())
        .on(On::Tool("append"), Reply::sse().repeat(Duration::from_millis(1), ": on\n\n"));
    for nth in 1..=2 {
        let mut stream = connect(&server).await;
        stream.write_all(post(None, &call(1, "append", "x")).as_bytes()).await.unwrap();
        server.until_called("append", nth).await;
        let seen = server.calls("append").pop().unwrap();
        assert!(!server.left(&seen));
        drop(stream);
        server.until(|_| server.left(&seen)).await;
    }
}

#[tokio::test]
async fn stopped_it_refuses_and_started_again_it_knows_no_session() {
    let server = Server::start().await;
    let mut stream = connect(&server).await;
    session(&mut stream).await;
    server.stop();
    let mut rest = Vec::new();
    timeout(SOON, stream.read_to_end(&mut rest)).await.expect("its connections close").unwrap_or_default();
    assert_eq!(rest, b"");
    let begin = Instant::now();
    while let Ok(stream) = TcpStream::connect(server.address()).await {
        drop(stream);
        assert!(begin.elapsed() < SOON, "somebody listens");
        tokio::task::yield_now().await;
    }
    server.start_again().await;
    let mut stream = connect(&server).await;
    let (head, _) = answer(&mut stream, &post(Some("s1"), &call(1, "append", "x"))).await;
    assert!(head.starts_with("HTTP/1.1 404 "), "{head}");
    assert_eq!(session(&mut stream).await, "s2");
    server.unknown_session(http::no_valid_session());
    let (head, body) = answer(&mut stream, &post(Some("s1"), &call(1, "append", "x"))).await;
    assert!(head.starts_with("HTTP/1.1 400 ") && body.contains("No valid session ID"), "{head}{body}");
}

#[tokio::test]
async fn nobody_refuses_and_a_black_hole_does_neither() {
    let error = TcpStream::connect(nobody().await).await.unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
    let hole = BlackHole::new().await;
    let address = hole.url().trim_start_matches("http://").trim_end_matches("/mcp").to_owned();
    let connecting = timeout(Duration::from_millis(300), TcpStream::connect(address)).await;
    assert!(connecting.is_err(), "neither taken nor refused");
}

#[test]
fn dates_are_written_as_http_writes_them() {
    for (seconds, text) in [
        (0, "Thu, 01 Jan 1970 00:00:00 GMT"),
        (784_111_777, "Sun, 06 Nov 1994 08:49:37 GMT"),
        (951_827_696, "Tue, 29 Feb 2000 12:34:56 GMT"),
        (1_798_761_599, "Thu, 31 Dec 2026 23:59:59 GMT"),
        (4_107_542_400, "Mon, 01 Mar 2100 00:00:00 GMT"),
    ] {
        assert_eq!(http::date(seconds), text);
    }
    assert!(http::http_date(SOON).ends_with(" GMT"));
}
