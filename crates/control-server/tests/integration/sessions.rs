//! Sessions of browsers and streams of watchers end when access is checked again.

use coreward_api::Role;
use coreward_http::tokens::token_file;
use nix::sys::signal::{Signal, kill};
use nix::unistd::getpid;
use reqwest::StatusCode;

use crate::support::{SIGHUP_REACHES_ALL, TestDirectory, with_timeout};

#[tokio::test]
async fn new_token_ends_sessions_of_the_old_one() {
    let _alone = SIGHUP_REACHES_ALL.lock().await;
    let home = TestDirectory::new(&["s1"], "[[service]]\nname = \"web\"\nvip = \"10.200.0.1:80\"\n");
    let running = home.start().await;
    let http = reqwest::Client::builder().no_proxy().build().unwrap();
    let url = |path: &str| format!("http://{}/v1/{path}", running.api);
    let file = token_file(home.directory.path(), Role::Viewer);
    let old = std::fs::read_to_string(&file).unwrap().trim().to_owned();

    let begun = http.post(url("session")).bearer_auth(&old).send().await.unwrap();
    let cookie = begun.headers()["set-cookie"].to_str().unwrap();
    assert!(!cookie.contains("Secure"), "by plain HTTP a browser would not take it: {cookie}");
    let cookie = cookie.split(';').next().unwrap().to_owned();
    let with_cookie = async |request: reqwest::RequestBuilder| request.header("cookie", &cookie).send().await.unwrap();
    assert_eq!(with_cookie(http.get(url("health"))).await.status(), StatusCode::OK);
    let another = with_cookie(http.post(url("session"))).await;
    assert_eq!(another.status(), StatusCode::FORBIDDEN, "a session that begins sessions never ends");
    let mut watches =
        [http.get(url("watch")).bearer_auth(&old).send().await.unwrap(), with_cookie(http.get(url("watch"))).await];

    // The tokens are the same: a stream may be of one who has been revoked, and ends; a session goes on.
    kill(getpid(), Signal::SIGHUP).unwrap();
    with_timeout("the stream's end", async { while watches[1].chunk().await.unwrap().is_some() {} }).await;
    assert_eq!(with_cookie(http.get(url("health"))).await.status(), StatusCode::OK);
    watches[1] = with_cookie(http.get(url("watch"))).await;

    std::fs::remove_file(&file).unwrap();
    kill(getpid(), Signal::SIGHUP).unwrap();
    for watch in &mut watches {
        with_timeout("the stream's end", async { while watch.chunk().await.unwrap().is_some() {} }).await;
    }
    assert_eq!(with_cookie(http.get(url("health"))).await.status(), StatusCode::UNAUTHORIZED);
    let status = async |token: &str| http.get(url("health")).bearer_auth(token).send().await.unwrap().status();
    assert_eq!(status(&old).await, StatusCode::UNAUTHORIZED);
    let new = std::fs::read_to_string(&file).unwrap();
    assert_eq!(status(new.trim()).await, StatusCode::OK);
}
