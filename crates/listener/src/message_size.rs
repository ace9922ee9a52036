//! Maximum message size for each kind of caller. tonic has only one limit, which is too large for thousands of agents.

use std::convert::Infallible;
use std::sync::Arc;
use std::task::{Context, Poll};

use coreward_rpc::v1::control_server::{Control, ControlServer, SERVICE_NAME};
use coreward_wire::MAX_AGENT_MESSAGE_BYTES;
use http::Request;
use tonic::server::NamedService;
use tower_service::Service;

/// Maximum size, in bytes, of a message from a load balancer or rack. The largest contains the traffic of 16,384
/// servers.
const MAX_CONTROL_MESSAGE_BYTES: usize = 4 << 20;
const AGENT_METHOD_PATH: &str = "/coreward.v1.Control/Agent";

/// [`ControlServer`] with a lower size limit for messages from agents than for messages from other peers. A message
/// above the limit ends the stream before its body is read.
pub struct SizeLimitedControlServer<T> {
    agent_server: ControlServer<T>,
    non_agent_server: ControlServer<T>,
}

impl<T: Control> SizeLimitedControlServer<T> {
    pub fn new(methods: T) -> Self {
        let control_methods = Arc::new(methods);
        let server_with_size_limit =
            |bytes| ControlServer::from_arc(control_methods.clone()).max_decoding_message_size(bytes);
        Self {
            agent_server: server_with_size_limit(MAX_AGENT_MESSAGE_BYTES),
            non_agent_server: server_with_size_limit(MAX_CONTROL_MESSAGE_BYTES),
        }
    }
}

impl<T> Clone for SizeLimitedControlServer<T> {
    fn clone(&self) -> Self {
        Self { agent_server: self.agent_server.clone(), non_agent_server: self.non_agent_server.clone() }
    }
}

impl<T> NamedService for SizeLimitedControlServer<T> {
    const NAME: &'static str = SERVICE_NAME;
}

impl<T, B> Service<Request<B>> for SizeLimitedControlServer<T>
where
    ControlServer<T>: Service<Request<B>, Error = Infallible>,
{
    type Response = <ControlServer<T> as Service<Request<B>>>::Response;
    type Error = Infallible;
    type Future = <ControlServer<T> as Service<Request<B>>>::Future;

    fn poll_ready(&mut self, _context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        // Both services are always ready, because they have no state.
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        if request.uri().path() == AGENT_METHOD_PATH {
            self.agent_server.call(request)
        } else {
            self.non_agent_server.call(request)
        }
    }
}
