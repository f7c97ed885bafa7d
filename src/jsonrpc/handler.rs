//! What the peer asks of us.

use std::{fmt, future::Future, panic::AssertUnwindSafe, sync::Arc};

use serde::de::DeserializeOwned;
use serde_json::value::RawValue;

use super::{Response, message::parse_params};
use crate::{ServerError, connection::BoxFuture};

/// Answers the requests and takes the notifications that come from the peer.
///
/// Requests run concurrently, each in a task of its own, at most 64 at once; one more is answered with
/// -32603. When the connection is gone they are dropped, and so are their answers: those belong to no other
/// connection. A panic is answered with -32603 and harms nothing else.
///
/// A handler that keeps a [`Client`](super::Client) of the same connection keeps that connection open.
pub trait Handler: Send + Sync + 'static {
    /// Answers a request. As it stands: method not found (-32601).
    fn request(&self, request: ServerRequest) -> impl Future<Output = Result<Response, ServerError>> + Send {
        let _ = request;
        async { Err(not_found()) }
    }

    /// Takes a notification, in the order in which they arrive. As it stands: ignores it.
    ///
    /// It runs within the connection's task and holds up everything else, so it must return soon; it may
    /// spawn what takes longer.
    fn notification(&self, notification: Notification) {
        let _ = notification;
    }
}

/// Handles nothing: every request is answered with method not found (-32601).
impl Handler for () {}

impl<H: Handler> Handler for Arc<H> {
    fn request(&self, request: ServerRequest) -> impl Future<Output = Result<Response, ServerError>> + Send {
        (**self).request(request)
    }

    fn notification(&self, notification: Notification) {
        (**self).notification(notification);
    }
}

/// A [`Handler`], erased.
pub(crate) trait AnyHandler: Send + Sync {
    fn request(self: Arc<Self>, request: ServerRequest) -> BoxFuture<Result<Response, ServerError>>;

    /// `false` if it panicked.
    fn notification(&self, notification: Notification) -> bool;
}

impl<H: Handler> AnyHandler for H {
    fn request(self: Arc<Self>, request: ServerRequest) -> BoxFuture<Result<Response, ServerError>> {
        Box::pin(async move { Handler::request(&*self, request).await })
    }

    fn notification(&self, notification: Notification) -> bool {
        std::panic::catch_unwind(AssertUnwindSafe(|| Handler::notification(self, notification))).is_ok()
    }
}

pub(super) fn not_found() -> ServerError {
    ServerError::new(-32601, "method not found")
}

pub(super) fn internal(what: &str) -> ServerError {
    ServerError::new(-32603, what)
}

/// A request from the peer.
pub struct ServerRequest {
    method: String,
    params: Option<Box<RawValue>>,
    /// Its id, as it stood on the wire.
    pub(crate) id: Box<str>,
}

/// A notification from the peer: it expects no answer.
pub struct Notification {
    method: String,
    params: Option<Box<RawValue>>,
}

macro_rules! incoming {
    ($name:ident $(, $id:ident)?) => {
        impl $name {
            pub(super) fn new(method: String, params: Option<Box<RawValue>>, $($id: &str)?) -> Self {
                Self { method, params, $($id: $id.into())? }
            }

            /// The method.
            pub fn method(&self) -> &str {
                &self.method
            }

            /// The parameters, parsed; those that are absent as JSON's `null`.
            ///
            /// # Errors
            ///
            /// If they do not fit the type.
            pub fn params<T: DeserializeOwned>(&self) -> Result<T, serde_json::Error> {
                parse_params(self.raw_params())
            }

            /// The parameters as JSON text, if there are any.
            pub fn raw_params(&self) -> Option<&RawValue> {
                self.params.as_deref()
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                // Without the parameters: they do not belong in a log.
                f.debug_struct(stringify!($name)).field("method", &self.method).finish_non_exhaustive()
            }
        }
    };
}

incoming!(ServerRequest, id);
incoming!(Notification);
