"""Which URLs and addresses an adapter may come from."""

import pytest

from deployments.config.url_allowlist import is_prefix, is_public


@pytest.mark.spec("L2")
def test_an_allow_list_holds_whole_folders() -> None:
    assert all(is_prefix(text) for text in ("s3://ours/", "hf://org/name@main/", "file:///srv/"))
    assert not any(is_prefix(text) for text in ("s3://ours", "ours/", "s3://ours/../", "*", ""))


@pytest.mark.spec("L2")
def test_only_public_addresses_are_public() -> None:
    private = "127.0.0.1 10.1.2.3 192.168.0.1 169.254.169.254 ::1 fe80::1%eth0 ::ffff:10.0.0.1"
    assert not any(is_public(address) for address in (*private.split(), "0.0.0.0", "224.0.0.1"))
    through = "64:ff9b::7f00:1 64:ff9b::a9fe:a9fe 2002:7f00:1:: 2002:a00:1:: ::ffff:10.0.0.1"
    assert not any(is_public(address) for address in through.split())
    assert is_public("64:ff9b::909:909") and is_public("2002:909:909::")
    assert is_public("9.9.9.9") and is_public("2620:fe::fe")
