//! What the connections and connectors of this crate can tell about themselves. A foreign connection is a
//! plain service: nothing here is asked of it.

use std::{
    any::Any,
    future::Future,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use crate::{Basis, CallError, Effect, event::Peer, mcp::ToolRules, write_safety::ledger::Registrar};

pub(crate) type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// A connection of this crate, seen by the reconnect layer and the stack.
pub(crate) trait Connection: Any + Send + Sync {
    /// Who is there, as far as a handshake has said.
    fn peer(&self) -> Option<Peer>;

    /// Whether there is a process of ours at the other end.
    fn has_process(&self) -> bool;

    /// Whether the previous process was still there when this one was started.
    fn overlapped(&self) -> bool;

    /// The last lines of the process's standard error.
    fn stderr(&self) -> Vec<String>;

    /// A read-only request that shows that the server works, by its method's name.
    fn probe(&self) -> Option<(String, BoxFuture<Result<(), CallError>>)>;

    /// Closes the connection; resolves when its process, if it has one, is reaped, within bounds.
    fn close(&self) -> BoxFuture<()>;
}

/// Drops what is foreign. A destructor that panics harms nobody.
pub(crate) fn discard<T>(foreign: T) {
    let _ = catch_unwind(AssertUnwindSafe(|| drop(foreign)));
}

/// The connection as one of this crate's, if it is one.
pub(crate) fn known<C: 'static>(connection: &C) -> Option<Arc<dyn Connection>> {
    let connection = connection as &dyn Any;
    if let Some(client) = connection.downcast_ref::<crate::jsonrpc::Client>() {
        return Some(Arc::new(client.clone()));
    }
    #[cfg(feature = "rmcp")]
    if let Some(connection) = connection.downcast_ref::<crate::sdk::Connection>() {
        return Some(Arc::new(connection.clone()));
    }
    let connection = connection.downcast_ref::<crate::mcp::Connection>()?;
    Some(Arc::new(connection.clone()))
}

/// What says what effect a request has, and on what basis; `None` keeps the request's own.
pub(crate) type Classifier<Req> = Arc<dyn Fn(&Req) -> Option<(Effect, Basis)> + Send + Sync>;

/// The classifier that a connector of this crate brings along, if it is one for such requests.
pub(crate) fn classifier_of<M: 'static, Req: 'static>(connector: &M) -> Option<Classifier<Req>> {
    #[cfg(feature = "rmcp")]
    if let Some(connector) = (connector as &dyn Any).downcast_ref::<crate::sdk::Connector>() {
        return (&connector.classifier() as &dyn Any).downcast_ref::<Classifier<Req>>().cloned();
    }
    let rules = (connector as &dyn Any).downcast_ref::<crate::mcp::Stdio>()?.classifier();
    (&rules as &dyn Any).downcast_ref::<Classifier<Req>>().cloned()
}

/// What the caller says of the server's tools, where the connector is one of this crate.
pub(crate) fn tool_rules_of<M: 'static>(connector: &M) -> Option<&ToolRules> {
    let connector = connector as &dyn Any;
    #[cfg(feature = "rmcp")]
    if let Some(connector) = connector.downcast_ref::<crate::sdk::Connector>() {
        return Some(connector.rules());
    }
    Some(connector.downcast_ref::<crate::mcp::Stdio>()?.rules())
}

/// Waits, within bounds, until the process that a connector started last is gone.
pub(crate) type Reaper = Arc<dyn Fn() -> BoxFuture<()> + Send + Sync>;

/// The reaper of a connector of this crate, also of what it has started for a connect that was given up.
pub(crate) fn reaper_of<M: 'static>(connector: &M) -> Option<Reaper> {
    let connector = connector as &dyn Any;
    #[cfg(feature = "rmcp")]
    if let Some(connector) = connector.downcast_ref::<crate::sdk::Connector>() {
        return connector.reaper();
    }
    let child = connector.downcast_ref::<crate::stdio::Child>().map(crate::stdio::Child::reaper);
    child.or_else(|| Some(connector.downcast_ref::<crate::mcp::Stdio>()?.reaper()))
}

/// What a connector of this crate knows of the connect that is under way.
pub(crate) fn under_way_of<M: 'static>(connector: &M) -> Option<UnderWay> {
    let connector = connector as &dyn Any;
    #[cfg(feature = "rmcp")]
    if let Some(connector) = connector.downcast_ref::<crate::sdk::Connector>() {
        return Some(connector.under_way());
    }
    let child = connector.downcast_ref::<crate::stdio::Child>().map(crate::stdio::Child::under_way);
    child.or_else(|| Some(connector.downcast_ref::<crate::mcp::Stdio>()?.under_way()))
}

/// What a connector knows of its connect that is under way, for the errors of those whom it takes too long.
#[derive(Clone, Default)]
pub(crate) struct UnderWay(Arc<Mutex<Option<Begun>>>);

struct Begun {
    /// Whether a process was started for it.
    started: bool,
    /// What the server was asked last.
    asked: Option<&'static str>,
    /// How many of its lines were no JSON-RPC messages.
    unread: Arc<AtomicU64>,
}

impl UnderWay {
    /// The transport is open, and the handshake begins; until what this returns is dropped.
    pub(crate) fn begin(&self, started: bool, unread: Arc<AtomicU64>) -> impl Drop + Send + use<> {
        *self.lock() = Some(Begun { started, asked: None, unread });
        EndOnDrop(self.clone())
    }

    /// The server is asked that.
    pub(crate) fn asks(&self, method: &'static str) {
        if let Some(begun) = &mut *self.lock() {
            begun.asked = Some(method);
        }
    }

    /// What there is to say, without anything that the server wrote.
    pub(crate) fn so_far(&self) -> Option<String> {
        let begun = self.lock();
        let begun = begun.as_ref()?;
        let who = if begun.started { "the server was started and" } else { "the server" };
        let mut text = match begun.asked {
            Some(method) => format!("{who} has not answered `{method}`"),
            None => format!("{who} has not ended the handshake"),
        };
        let lines = match begun.unread.load(Ordering::Relaxed) {
            0 => return Some(text),
            1 => "1 line of its output was no JSON-RPC message".to_owned(),
            n => format!("{n} lines of its output were no JSON-RPC messages"),
        };
        text.push_str(&format!("; {lines} (its standard output must carry nothing else)"));
        Some(text)
    }

    fn lock(&self) -> MutexGuard<'_, Option<Begun>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct EndOnDrop(UnderWay);

impl Drop for EndOnDrop {
    fn drop(&mut self) {
        *self.0.lock() = None;
    }
}

/// What a connector of this crate tells beside its connections.
#[derive(Default)]
pub(crate) struct Hooks {
    pub(crate) reaper: Option<Reaper>,
    pub(crate) under_way: Option<UnderWay>,
}

/// Has a connector of this crate enter each process that it starts; `false` if it is none.
pub(crate) fn register_with<M: 'static>(connector: &mut M, registrar: Registrar) -> bool {
    let connector = connector as &mut dyn Any;
    #[cfg(feature = "rmcp")]
    if let Some(connector) = connector.downcast_mut::<crate::sdk::Connector>() {
        return connector.register_with(registrar);
    }
    if let Some(child) = connector.downcast_mut::<crate::stdio::Child>() {
        child.register_with(registrar);
    } else if let Some(stdio) = connector.downcast_mut::<crate::mcp::Stdio>() {
        return stdio.register_with(registrar);
    } else {
        return false;
    }
    true
}

/// What is wrong with a connector of this crate, if it is one and something is.
pub(crate) fn validate<M: 'static>(connector: &M) -> Result<(), String> {
    let connector = connector as &dyn Any;
    if let Some(child) = connector.downcast_ref::<crate::stdio::Child>() {
        return child.validate().map_err(|error| error.to_string());
    }
    #[cfg(feature = "rmcp")]
    if let Some(connector) = connector.downcast_ref::<crate::sdk::Connector>() {
        return connector.validate().map_err(|error| error.to_string());
    }
    if let Some(stdio) = connector.downcast_ref::<crate::mcp::Stdio>() {
        return stdio.validate().map_err(|error| error.to_string());
    }
    Ok(())
}
